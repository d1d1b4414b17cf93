// How a UcxLink is made.

#include <algorithm>
#include <chrono>
#include <future>
#include <optional>
#include <random>
#include <utility>

#include "base/byte_io.h"
#include "kvxfer/status.h"
#include "transport/common/socket.h"
#include "transport/ucx/ucx_link.h"

namespace kvxfer {
namespace {

constexpr uint32_t kMaxLanes = 64;
constexpr uint32_t kMaxLane = 256;

// What the writer tells the reader.
std::vector<std::byte> encode(const ucp::Lanes& lanes) {
  ByteWriter writer;
  writer.put(uint32_t{lanes.put});
  writer.put(static_cast<uint32_t>(lanes.names.size()));
  for (const std::string& lane : lanes.names) writer.put_string(lane);
  return writer.take();
}

ucp::Lanes decode(std::span<const std::byte> bytes) {
  ByteReader reader(bytes);
  ucp::Lanes lanes;
  const auto put = reader.get<uint32_t>();
  lanes.put = put == 1;
  const auto count = reader.get<uint32_t>();
  reader.check_count(count, kMaxLanes, "a list of lanes", sizeof(uint32_t));
  bool sense = put <= 1;
  for (uint32_t i = 0; i < count; ++i) {
    const std::string& name = lanes.names.emplace_back(reader.get_string(kMaxLane));
    // It is shown.
    sense &= std::all_of(name.begin(), name.end(), [](char c) { return c > ' ' && c < 0x7f; });
  }
  reader.expect_end();
  if (!sense) throw Error(StatusCode::kProtocol, "the peer's UCX lanes make no sense");
  return lanes;
}

ucp::Key random_key() {
  std::random_device source;
  ucp::Key key;
  for (std::byte& byte : key) byte = static_cast<std::byte>(source());
  return key;
}

struct Outcome {
  std::string problem;
  ucp::Lanes lanes;
  double rate = 0;
};

// Has `driver` connect, on its loop, and waits for what that comes to.
Outcome connect(const std::shared_ptr<ucp::Driver>& driver, const ucp::ReaderAddress& reader,
                double timeout) {
  auto promise = std::make_shared<std::promise<Outcome>>();
  std::future<Outcome> outcome = promise->get_future();
  const bool posted = driver->loop()->post([driver, reader, promise] {
    driver->set_on_progress([driver = driver.get(), promise] {
      Outcome outcome;
      outcome.problem = driver->take_problem();
      if (outcome.problem.empty() && !driver->connected()) return;
      if (outcome.problem.empty()) {
        outcome.lanes = driver->lanes();
        outcome.rate = driver->bytes_per_second();
      }
      driver->set_on_progress(nullptr);
      promise->set_value(std::move(outcome));
    });
    driver->connect(reader);
    driver->drive();
  });
  if (!posted) throw Error(StatusCode::kClosed, "the agent is closed");
  if (outcome.wait_for(std::chrono::duration<double>(timeout)) != std::future_status::ready) {
    return {"UCX: the peer did not answer within " + std::to_string(timeout) + " s", {}, 0};
  }
  return outcome.get();
}

}  // namespace

UcxEndpoint::UcxEndpoint(const UcxFabric& fabric, std::shared_ptr<UcxMemory> arena)
    : state_(std::make_unique<State>()) {
  state_->fabric = fabric.state_;
  state_->arena = std::move(arena);
  state_->driver = std::make_shared<ucp::Driver>(state_->fabric, state_->fabric->loop());
  if (state_->arena) {
    ucp::ReaderAddress address;
    address.key = state_->key = random_key();
    address.arena_base = reinterpret_cast<uint64_t>(state_->arena->memory().data());
    address.arena_bytes = state_->arena->memory().size();
    address.rkey = state_->arena->rkey();
    address.worker = state_->driver->address();
    state_->address = address.encode();
  }
  state_->driver->start(state_->arena ? std::optional(state_->key) : std::nullopt);
}

UcxEndpoint::~UcxEndpoint() = default;
UcxEndpoint::UcxEndpoint(UcxEndpoint&&) noexcept = default;
UcxEndpoint& UcxEndpoint::operator=(UcxEndpoint&&) noexcept = default;

const std::vector<std::byte>& UcxEndpoint::address() const { return state_->address; }
const std::vector<std::string>& UcxEndpoint::lanes() const { return state_->lanes.names; }

bool UcxEndpoint::rdma() const {
  const std::vector<std::string>& names = state_->lanes.names;
  return !names.empty() && std::all_of(names.begin(), names.end(), ucp::is_rdma);
}

std::shared_ptr<Link> UcxEndpoint::connect(int control_fd, std::span<const std::byte> remote,
                                           double timeout) {
  UniqueFd control(control_fd);
  prepare_stream_socket(control.get());
  if (is_tcp_socket(control.get())) prepare_tcp_socket(control.get());
  if (!state_->driver) throw Error(StatusCode::kInvalid, "this endpoint is connected already");
  IoThreads& threads = *state_->fabric->threads;
  if (state_->arena) {
    state_->lanes = decode(remote);
    if (state_->lanes.put && !state_->arena->handle()) {
      throw Error(StatusCode::kProtocol, "the peer would put, and has no key for it");
    }
    auto link = std::make_shared<UcxLink>(threads, std::move(control), *state_, 0, 0.0);
    state_->driver.reset();
    return link;
  }
  const auto reader = ucp::ReaderAddress::decode(remote);
  Outcome outcome = kvxfer::connect(state_->driver, reader, timeout);
  if (!outcome.problem.empty()) {
    state_->driver.reset();
    throw Error(StatusCode::kUnreachable, outcome.problem);
  }
  state_->lanes = std::move(outcome.lanes);
  state_->key = reader.key;
  state_->address = encode(state_->lanes);
  // Of sockets and memory UCX knows no rate, but says one.
  const double rate = rdma() ? outcome.rate : 0;
  auto link =
      std::make_shared<UcxLink>(threads, std::move(control), *state_, reader.arena_bytes, rate);
  state_->driver.reset();
  return link;
}

}  // namespace kvxfer
