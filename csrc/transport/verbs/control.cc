#include "transport/verbs/control.h"

#include <algorithm>

#include "base/byte_io.h"
#include "kvxfer/status.h"
#include "kvxfer/transport.h"

namespace kvxfer::ibv {
namespace {

// What a frame holds: a message, the first part of one that with this byte would be too long for a
// frame, or a PathMessage.
constexpr std::byte kWhole{0}, kFirstPart{1}, kAboutPath{2};

constexpr uint32_t kMaxReason = 4096;
constexpr uint32_t k24Bits = 0xffffff;

std::vector<std::byte> frame(std::byte kind, std::span<const std::byte> content) {
  std::vector<std::byte> framed;
  framed.reserve(1 + content.size());
  framed.push_back(kind);
  framed.insert(framed.end(), content.begin(), content.end());
  return framed;
}

}  // namespace

std::vector<std::byte> PathMessage::encode() const {
  ByteWriter out;
  out.put(static_cast<uint8_t>(kind));
  out.put(path);
  out.put(epoch);
  out.put(landed);
  out.put(qp.number);
  out.put(qp.psn);
  out.put_string(reason.substr(0, kMaxReason));
  return out.take();
}

PathMessage PathMessage::decode(std::span<const std::byte> bytes) {
  ByteReader reader(bytes);
  PathMessage message;
  const auto kind = reader.get<uint8_t>();
  if (kind < kClose || kind > kRefused) {
    throw Error(StatusCode::kProtocol,
                "the peer sent a path message of kind " + std::to_string(kind));
  }
  message.kind = static_cast<Kind>(kind);
  message.path = reader.get<uint16_t>();
  message.epoch = reader.get<uint32_t>();
  message.landed = reader.get<uint64_t>();
  message.qp.number = reader.get<uint32_t>();
  message.qp.psn = reader.get<uint32_t>();
  if (message.qp.number > k24Bits || message.qp.psn > k24Bits) {
    throw Error(StatusCode::kProtocol,
                "the peer named a queue pair number or PSN of more than 24 bits");
  }
  message.reason = reader.get_string(kMaxReason);
  reader.expect_end();
  return message;
}

ControlSocket::Failure ControlSocket::send(std::span<const std::byte> message) {
  if (message.size() > kMaxMessage) return socket_.send(message);  // which says that it is too long
  const std::lock_guard lock(mutex_);
  if (message.size() < kMaxMessage) return socket_.send(frame(kWhole, message));
  const size_t half = message.size() / 2;
  if (Failure failure = socket_.send(frame(kFirstPart, message.first(half)))) return failure;
  return socket_.send(frame(kWhole, message.subspan(half)));
}

ControlSocket::Failure ControlSocket::send(const PathMessage& message) {
  return socket_.send(frame(kAboutPath, message.encode()));
}

ControlSocket::Failure ControlSocket::receive(
    const std::function<bool(std::span<const std::byte>)>& deliver,
    const std::function<bool(const PathMessage&)>& about_path) {
  return socket_.receive([&](std::span<const std::byte> framed) {
    if (framed.empty()) throw Error(StatusCode::kProtocol, "the peer sent an empty frame");
    const auto content = framed.subspan(1);
    if (framed[0] == kAboutPath) return about_path(PathMessage::decode(content));
    if (framed[0] == kFirstPart) {
      first_part_.assign(content.begin(), content.end());
      return true;
    }
    if (framed[0] != kWhole) {
      throw Error(StatusCode::kProtocol,
                  "the peer does not speak this protocol: it sent a frame "
                  "of a kind that does not exist");
    }
    if (first_part_.empty()) return deliver(content);
    std::vector<std::byte> whole = std::move(first_part_);
    first_part_ = {};
    whole.insert(whole.end(), content.begin(), content.end());
    if (whole.size() > kMaxMessage) {
      throw Error(StatusCode::kProtocol, "the peer sent a control message that is too long");
    }
    return deliver(whole);
  });
}

}  // namespace kvxfer::ibv
