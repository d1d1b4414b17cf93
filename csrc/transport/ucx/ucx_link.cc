#include "transport/ucx/ucx_link.h"

#include <sys/epoll.h>
#include <sys/socket.h>

#include <algorithm>
#include <utility>

#include "kvxfer/status.h"
#include "transport/common/socket.h"

namespace kvxfer {
namespace {

// An endpoint whose peer does not answer is closed when this has passed, by destroying its worker.
// Less than an agent that closes waits for its links.
constexpr auto kLongestClose = std::chrono::milliseconds(300);

std::string text_of(const UcxEndpoint::State& endpoint, int socket) {
  std::string text = "ucx " + endpoint.fabric->library->version + " over ";
  for (const std::string& name : endpoint.lanes.names) {
    text += (&name == endpoint.lanes.names.data() ? "" : ", ") + name;
  }
  text += endpoint.lanes.put ? ", by put" : ", in messages";
  return text + "; control " + local_address(socket) + " - " + peer_address(socket);
}

}  // namespace

UcxLink::UcxLink(IoThreads& threads, UniqueFd socket, UcxEndpoint::State endpoint,
                 uint64_t arena_bytes, double rate)
    : LinkBase(threads.control(), 2),
      fabric_(endpoint.fabric),
      arena_(endpoint.arena),
      driver_(endpoint.driver),
      reader_(arena_ != nullptr),
      puts_(endpoint.lanes.put),
      key_(endpoint.key),
      arena_bytes_(arena_bytes),
      rate_(rate),
      description_(text_of(endpoint, socket.get())),
      socket_(threads.control(), std::move(socket)) {}

void UcxLink::begin() {
  socket_.watch([weak = weak<UcxLink>()](uint32_t events) {
    if (const auto self = weak.lock()) self->on_control(events);
  });
  driver_->loop()->post([weak = weak<UcxLink>()] {
    const auto self = weak.lock();
    if (!self || self->finished_) return;
    self->driver_->set_on_progress([weak] {
      if (const auto link = weak.lock()) link->collect();
    });
    self->driver_->drive();
  });
}

void UcxLink::shut() {
  socket_.shutdown(SHUT_RDWR);
  control().post([self = shared_from_this(), this] {
    socket_.unwatch();
    leave();
  });
  driver_->loop()->post([self = shared_from_this(), this] { end_driver(); });
}

void UcxLink::send(std::span<const std::byte> message) {
  if (closing()) return;
  if (const auto failure = socket_.send(message)) fail(*failure);
}

void UcxLink::write(std::span<const std::byte> source, uint64_t offset,
                    std::span<const std::byte> notice, uint64_t token) {
  if (source.size() > kMaxWrite || notice.size() > kMaxNotice) {
    fail("a write of " + std::to_string(source.size()) + " bytes with a notice of " +
         std::to_string(notice.size()) + " is over the limits");
  } else if (reader_) {
    fail("a write on the side that has the arena");
  } else if (offset > arena_bytes_ || source.size() > arena_bytes_ - offset) {
    fail("a write of " + std::to_string(source.size()) + " bytes at " + std::to_string(offset) +
         " reaches over the end of the peer's arena of " + std::to_string(arena_bytes_));
  }
  if (!enter()) {
    sink().on_written(*this, token, false);
    return;
  }
  auto write = std::make_shared<ucp::Write>();
  write->token = token;
  write->source = source;
  write->offset = offset;
  const bool put = puts_ && !source.empty();
  write->head = ucp::Message::encode_head(key_, offset, source.size(), put, notice);
  write->memory = fabric_->memory_of(source);
  driver_->loop()->post([self = shared_from_this(), this, write, put] {
    driver_->begin(write, put);
    driver_->drive();
    collect();
    leave();
  });
}

void UcxLink::on_control(uint32_t events) {
  if (closing()) {
    socket_.unwatch();
    return;
  }
  FrameSocket::Failure failure;
  if (events & EPOLLOUT) failure = socket_.flush();
  if (!failure) failure = receive_control();
  if (failure) fail(*failure);
}

FrameSocket::Failure UcxLink::receive_control() {
  return socket_.receive([this](std::span<const std::byte> message) {
    sink().on_message(*this, message);
    return !closing();
  });
}

// On the driver's loop: what UCX's callbacks have taken note of.
void UcxLink::collect() {
  for (const auto& [token, ok] : driver_->take_written()) sink().on_written(*this, token, ok);
  driver_->take_messages(
      [this](std::span<const std::byte> message) { return !closing() && deliver(message); });
  if (const std::string problem = driver_->take_problem(); !problem.empty()) lose(problem);
  if (ending_ && driver_->closed()) finish();
}

bool UcxLink::deliver(std::span<const std::byte> bytes) {
  ucp::Message message;
  try {
    message = ucp::Message::decode(bytes);
    if (!reader_ || (puts_ ? !message.bytes.empty() : message.put)) {
      throw Error(StatusCode::kProtocol, "the peer sent a write of a kind that was not agreed on");
    }
  } catch (const Error& error) {
    fail(error.what());
    return false;
  }
  bool accepted = true;
  if (!puts_) {
    std::byte* to = sink().on_incoming(*this, message.offset, message.bytes.size(), message.notice);
    accepted = to != nullptr;
    if (accepted) std::copy(message.bytes.begin(), message.bytes.end(), to);
  }
  sink().on_landed(*this, message.notice, accepted);
  return true;
}

// What the peer said on the control socket before comes first: it may say why.
void UcxLink::lose(const std::string& reason) {
  control().post([self = shared_from_this(), this, reason] {
    if (!closing()) {
      if (const auto failure = receive_control()) fail(*failure);
    }
    fail(reason);
  });
}

void UcxLink::end_driver() {
  ending_ = true;
  driver_->close_endpoint();
  if (reader_ || driver_->closed()) return finish();
  driver_->loop()->post_at(Clock::now() + kLongestClose,
                           [self = shared_from_this(), this] { finish(); });
  driver_->drive();
}

void UcxLink::finish() {
  if (std::exchange(finished_, true)) return;
  driver_->destroy();
  for (const auto& [token, ok] : driver_->take_written()) sink().on_written(*this, token, ok);
  leave();
}

}  // namespace kvxfer
