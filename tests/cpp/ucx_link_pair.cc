// Lets the tests of all transports run over UCX too, where there is one: over its sockets, and over
// its shared memory, which it takes only when told that errors are handled there. Where
// KVXFER_TEST_VERBS names adapters, over RDMA instead: reliable connections, whose puts are used,
// and datagrams.

#include <doctest/doctest.h>

#include <cstdlib>
#include <cstring>
#include <functional>
#include <string>

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
  const auto add = [](const char* name, const char* transports) {
    further_transports().emplace(name, std::bind(make_ucx_pair, transports, _1, _2, _3));
  };
  if (const char* devices = std::getenv("KVXFER_TEST_VERBS")) {
    // One adapter for both sides: UCX reads the environment for each context.
    const std::string device(devices, std::strcspn(devices, ",/"));
    ::setenv("UCX_NET_DEVICES", (device + ":1").c_str(), 1);
    ::setenv("UCX_IB_GID_INDEX", "0", 1);  // soft-RoCE drops its datagrams to IPv4 addresses
    add("ucx-rc", "rc_v");
    add("ucx-ud", "ud_v");
  } else {
    ::setenv("UCX_POSIX_ERROR_HANDLING", "y", 1);
    ::setenv("UCX_SYSV_ERROR_HANDLING", "y", 1);
    add("ucx-tcp", "tcp");
    add("ucx-shm", "posix,sysv");
  }
  return true;
}

[[maybe_unused]] const bool kAdded = add_ucx();

}  // namespace
}  // namespace kvxfer::testing
