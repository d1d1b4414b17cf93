#include "transport/verbs/notice.h"

#include <algorithm>
#include <utility>

#include "base/byte_io.h"
#include "kvxfer/status.h"
#include "kvxfer/transport.h"

namespace kvxfer::ibv {
namespace {

constexpr size_t kMaxOpen = 4096;  // writes that have arrived in part
constexpr uint16_t kMaxStripes = 64;

template <typename T>
std::byte* store_field(std::byte* to, T value) {
  for (size_t i = 0; i < sizeof(T); ++i) *to++ = static_cast<std::byte>(value >> (8 * i) & 0xff);
  return to;
}

}  // namespace

void NoticeHeader::store(std::byte* to) const {
  to = store_field(to, write);
  to = store_field(to, notice_bytes);
  to = store_field(to, notice_at);
  to = store_field(to, stripes);
  store_field(to, static_cast<uint16_t>(ends_stripe));
}

NoticeHeader NoticeHeader::load(std::span<const std::byte> from) {
  ByteReader reader(from);
  NoticeHeader header;
  header.write = reader.get<uint64_t>();
  header.notice_bytes = reader.get<uint32_t>();
  header.notice_at = reader.get<uint32_t>();
  header.stripes = reader.get<uint16_t>();
  const auto flags = reader.get<uint16_t>();
  header.ends_stripe = flags == 1;
  if (flags > 1 || header.notice_bytes > kMaxNotice || header.notice_at > header.notice_bytes ||
      header.stripes == 0 || header.stripes > kMaxStripes) {
    throw Error(StatusCode::kProtocol, "the peer sent a notice whose header makes no sense");
  }
  return header;
}

Inbox::Arrived Inbox::take(std::span<const std::byte> message) {
  if (message.size() < NoticeHeader::kBytes) {
    throw Error(StatusCode::kProtocol,
                "the peer sent a notice of " + std::to_string(message.size()) + " bytes");
  }
  const NoticeHeader header = NoticeHeader::load(message.first(NoticeHeader::kBytes));
  const auto piece = message.subspan(NoticeHeader::kBytes);
  if (piece.size() > header.notice_bytes - header.notice_at) {
    throw Error(StatusCode::kProtocol, "the peer sent more of a notice than it announced");
  }
  Arrived arrived;
  if (header.stripes == 1 && header.ends_stripe && piece.size() == header.notice_bytes) {
    arrived.stripe = arrived.write = true;
    arrived.notice.assign(piece.begin(), piece.end());
    return arrived;
  }

  const std::lock_guard lock(mutex_);
  const auto [entry, is_new] = open_.try_emplace(header.write);
  Open& open = entry->second;
  if (is_new) {
    if (open_.size() > kMaxOpen) {
      throw Error(StatusCode::kProtocol, "the peer has begun more than " +
                                             std::to_string(kMaxOpen) + " writes without an end");
    }
    open.stripes = open.stripes_left = header.stripes;
    open.notice.resize(header.notice_bytes);
  } else if (open.stripes != header.stripes || open.notice.size() != header.notice_bytes) {
    throw Error(StatusCode::kProtocol, "the peer contradicts itself about a write");
  }
  std::copy(piece.begin(), piece.end(),
            open.notice.begin() + static_cast<ptrdiff_t>(header.notice_at));
  arrived.stripe = header.ends_stripe;
  if (header.ends_stripe && --open.stripes_left == 0) {
    arrived.write = true;
    arrived.notice = std::move(open.notice);
    open_.erase(entry);
  }
  return arrived;
}

}  // namespace kvxfer::ibv
