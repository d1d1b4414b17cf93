// Lets the tests of all transports run over verbs too.

#include <doctest/doctest.h>

#include "link_pair.h"
#include "verbs_world.h"

namespace kvxfer::testing {
namespace {

std::pair<std::shared_ptr<Link>, std::shared_ptr<Link>> make_verbs_pair(
    IoThreads& producer_threads, IoThreads& consumer_threads, std::span<std::byte> arena) {
  if (!real_devices() && fake_verbs::objects().total() == 0) reset_world();
  VerbsFabric producer_fabric(producer_threads, options_for(false));
  VerbsFabric consumer_fabric(consumer_threads, options_for(true));
  VerbsEndpoint producer_end(producer_fabric, nullptr);
  VerbsEndpoint consumer_end(consumer_fabric,
                             consumer_fabric.register_memory(arena, VerbsAccess::kArena));
  const Bytes producer_address = producer_end.address();
  const Bytes consumer_address = consumer_end.address();
  const auto [p, c] = tcp_pair(false);
  auto consumer = make_verbs_link(consumer_threads, c, std::move(consumer_end), producer_address);
  auto producer = make_verbs_link(producer_threads, p, std::move(producer_end), consumer_address);
  return {producer, consumer};
}

[[maybe_unused]] const bool kAdded = further_transports().emplace("verbs", make_verbs_pair).second;

}  // namespace
}  // namespace kvxfer::testing
