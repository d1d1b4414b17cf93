// Lets the tests of all transports run over UCX too, where there is one: over its sockets, and over
// its shared memory, which it takes only when told that errors are handled there.

#include <doctest/doctest.h>

#include <cstdlib>
#include <future>

#include "kvxfer/status.h"
#include "kvxfer/ucx.h"
#include "link_pair.h"

namespace kvxfer::testing {
namespace {

constexpr double kTimeout = 10;

std::pair<std::shared_ptr<Link>, std::shared_ptr<Link>> make_ucx_pair(const char* transports,
                                                                      IoThreads& producer_threads,
                                                                      IoThreads& consumer_threads,
                                                                      std::span<std::byte> arena) {
  ::setenv("UCX_TLS", transports, 1);
  UcxFabric producer_fabric(producer_threads, {});
  UcxFabric consumer_fabric(consumer_threads, {});
  UcxEndpoint producer_end(producer_fabric, nullptr);
  UcxEndpoint consumer_end(consumer_fabric, consumer_fabric.register_memory(arena));
  const auto [p, c] = tcp_pair(false);
  auto producer = producer_end.connect(p, consumer_end.address(), kTimeout);
  auto consumer = consumer_end.connect(c, producer_end.address(), kTimeout);
  CHECK(producer_end.lanes() == consumer_end.lanes());
  return {producer, consumer};
}

bool add_ucx() {
  try {
    static_cast<void>(describe_ucx({}));
  } catch (const Error&) {
    return false;
  }
  using namespace std::placeholders;
  further_transports().emplace("ucx-tcp", std::bind(make_ucx_pair, "tcp", _1, _2, _3));
  ::setenv("UCX_POSIX_ERROR_HANDLING", "y", 1);
  ::setenv("UCX_SYSV_ERROR_HANDLING", "y", 1);
  further_transports().emplace("ucx-shm", std::bind(make_ucx_pair, "posix,sysv", _1, _2, _3));
  return true;
}

[[maybe_unused]] const bool kAdded = add_ucx();

}  // namespace
}  // namespace kvxfer::testing
