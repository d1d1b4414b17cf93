#include "transport/verbs/verbs_link.h"

#include <sys/epoll.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <utility>

#include "kvxfer/status.h"
#include "transport/common/socket.h"

namespace kvxfer {
namespace {

constexpr size_t kCompletionsAtOnce = 32;
// Other links of the same loop get their turn after so many polls.
constexpr int kPollsPerTurn = 16;
constexpr uint64_t kStripeUnit = 4096;
constexpr size_t kMaxStripes = 64;
constexpr auto kRetryInterval = std::chrono::milliseconds(1);
constexpr uint32_t kMaxRetries = 5000;

}  // namespace

VerbsLink::~VerbsLink() {
  for (const auto& path : paths_) {
    if (path->qp) path->loop->remove(path->qp->event_fd());
  }
}

void VerbsLink::watch(Path& path, bool keep_alive) {
  path.watched = true;
  std::weak_ptr<VerbsLink> weak = this->weak<VerbsLink>();
  auto held = keep_alive ? weak.lock() : nullptr;
  path.loop->add(path.qp->event_fd(), EPOLLIN, [weak, held, &path](uint32_t) {
    if (const auto self = weak.lock()) self->on_ready(path);
  });
}

void VerbsLink::begin() {
  fabric_->add(weak<VerbsLink>().lock());
  socket_.socket().watch([weak = weak<VerbsLink>()](uint32_t events) {
    if (const auto self = weak.lock()) self->on_control(events);
  });
  const Lock lock(mutex_);
  for (const auto& path : paths_) {
    if (path->qp && !path->watched) watch(*path, false);
  }
}

void VerbsLink::shut() {
  socket_.socket().shutdown(SHUT_RDWR);
  control().post([self = shared_from_this(), this] {
    socket_.socket().unwatch();
    leave();
  });
  for (const auto& path : paths_) {
    path->loop->post([self = shared_from_this(), this, &path = *path] { end_path(path); });
  }
}

void VerbsLink::send(std::span<const std::byte> message) {
  if (closing()) return;
  if (const auto failure = socket_.send(message)) fail(*failure);
}

void VerbsLink::write(std::span<const std::byte> source, uint64_t offset,
                      std::span<const std::byte> notice, uint64_t token) {
  std::string problem;
  if (source.size() > kMaxWrite || notice.size() > kMaxNotice) {
    problem = "a write of " + std::to_string(source.size()) + " bytes with a notice of " +
              std::to_string(notice.size()) + " is over the limits";
  } else if (reader_) {
    problem = "a write on the side that has the arena";
  } else if (offset > remote_.arena_bytes || source.size() > remote_.arena_bytes - offset) {
    problem = "a write of " + std::to_string(source.size()) + " bytes at " +
              std::to_string(offset) + " reaches over the end of the peer's arena of " +
              std::to_string(remote_.arena_bytes);
  }
  auto write = std::make_shared<ibv::Write>();
  write->token = token;
  write->notice.assign(notice.begin(), notice.end());
  write->to = remote_arena_;
  if (problem.empty() && !source.empty() && !closing()) {
    try {
      write->from = std::make_shared<ibv::LocalMemory>(
          std::vector<std::shared_ptr<VerbsMemory>>{fabric_->memory_of(source)}, fabric_->rails,
          fabric_->loopbacks);
    } catch (const Error& error) {
      problem = error.what();
    }
  }
  const DirectPiece piece{source.data(), offset, source.size()};
  put(std::move(write), std::span(&piece, source.empty() ? 0 : 1), source.size(), problem);
}

void VerbsLink::write_direct(std::vector<DirectPiece> pieces, std::shared_ptr<DirectMemory> from,
                             std::shared_ptr<RemoteMemory> to, std::span<const std::byte> notice,
                             uint64_t token) {
  auto write = std::make_shared<ibv::Write>();
  write->token = token;
  write->notice.assign(notice.begin(), notice.end());
  write->from = std::dynamic_pointer_cast<const ibv::LocalMemory>(from);
  write->to = std::dynamic_pointer_cast<const ibv::Target>(to);
  from.reset();  // the source may be unmapped from on_written() on
  std::string problem;
  uint64_t size = 0;
  if (!write->from || !write->to || notice.size() > kMaxNotice || reader_) {
    problem = "a direct write that is not for this link";
  }
  for (const DirectPiece& piece : pieces) {
    if (!problem.empty()) break;
    size += piece.bytes;
    if (!write->from->holds(piece.source, piece.bytes) ||
        !write->to->holds(piece.offset, piece.bytes) || size > kMaxWrite) {
      problem = "a direct write of " + std::to_string(piece.bytes) + " bytes at " +
                std::to_string(piece.offset) + " that reaches over the end of registered memory";
    }
  }
  put(std::move(write), pieces, size, problem);
}

std::shared_ptr<DirectMemory> VerbsLink::register_memory(std::span<const DirectSpan> memory,
                                                         DirectUse use) {
  return fabric_->register_direct(memory, use);
}

std::string VerbsLink::adapters() const {
  std::string names;
  for (const auto& nic : fabric_->nics) names += (names.empty() ? "" : ", ") + nic->name;
  return names;
}

std::shared_ptr<RemoteMemory> VerbsLink::remote_memory(std::span<const std::byte> keys) {
  return std::make_shared<ibv::Target>(keys, remote_.rails.size());
}

void VerbsLink::put(std::shared_ptr<ibv::Write> write, std::span<const DirectPiece> pieces,
                    uint64_t size, const std::string& problem) {
  if (!problem.empty()) fail(problem);
  if (!enter()) {
    write->from.reset();
    sink().on_written(*this, write->token, false);
    return;
  }
  std::vector<std::pair<Path*, std::string>> problems;
  bool taken;
  {
    const Lock lock(mutex_);
    write->id = next_write_++;
    const auto used = cut(write, pieces, size);
    taken = !used.empty();
    for (Path* path : used) {
      if (std::string lost = pump(*path); !lost.empty()) problems.emplace_back(path, lost);
    }
  }
  for (const auto& [path, lost] : problems) lose_path(*path, lost);
  if (!taken) {
    write->failed = true;
    report({write});
  }
  leave();
}

// The open path that would be through soonest, on a rail that is not taken yet.
VerbsLink::Path* VerbsLink::choose_path(uint64_t bytes, const std::vector<size_t>& rails_taken) {
  const auto work = [bytes](const Path& path) { return path.sends->queued_bytes() + bytes; };
  Path* best = nullptr;
  for (size_t i = 0; i < paths_.size(); ++i) {
    Path& path = *paths_[(next_path_ + i) % paths_.size()];
    if (path.state != Path::kOpen || path.left) continue;
    if (std::find(rails_taken.begin(), rails_taken.end(), path.rail) != rails_taken.end()) continue;
    if (!best || work(path) * best->speed < work(*best) * path.speed) best = &path;
  }
  return best;
}

std::vector<VerbsLink::Path*> VerbsLink::cut(const std::shared_ptr<ibv::Write>& write,
                                             std::span<const DirectPiece> pieces, uint64_t size) {
  ++next_path_;
  const size_t most = std::clamp<size_t>(size / fabric_->options.stripe_bytes, 1, kMaxStripes);
  std::vector<Path*> used;
  std::vector<size_t> rails_taken;
  while (used.size() < most) {
    Path* path = choose_path(size, rails_taken);
    if (!path) break;
    rails_taken.push_back(path->rail);
    used.push_back(path);
  }
  if (used.empty()) return used;
  write->stripes = write->stripes_left = static_cast<uint16_t>(used.size());
  uint64_t all = 0, so_far = 0;
  for (const Path* path : used) all += path->speed;
  uint64_t taken = 0, at = 0;  // of the first of `pieces`, and of all
  for (size_t i = 0; i < used.size(); ++i) {
    so_far += used[i]->speed;
    const uint64_t end =
        i + 1 == used.size() ? size : size * so_far / all / kStripeUnit * kStripeUnit;
    ibv::Stripe stripe{write, {}, end - at, i == 0};
    while (at < end) {
      const DirectPiece& piece = pieces.front();
      const uint64_t bytes = std::min(piece.bytes - taken, end - at);
      stripe.pieces.push_back({piece.source + taken, piece.offset + taken, bytes});
      at += bytes;
      taken += bytes;
      if (taken < piece.bytes) continue;
      taken = 0;
      pieces = pieces.subspan(1);
    }
    used[i]->sends->add(std::move(stripe));
  }
  return used;
}

// With mutex_ held. Returns what ends the path, or nothing.
std::string VerbsLink::pump(Path& path) {
  if (path.state != Path::kOpen || !path.sends) return {};
  bool again = false;
  if (const int error = path.sends->pump(again)) {
    return "posting a work request failed: " + error_text(error);
  }
  if (!again) {
    path.retries = 0;
  } else if (++path.retries > kMaxRetries) {
    return "the adapter has had no room for a work request for seconds";
  } else if (!std::exchange(path.retry_planned, true)) {
    path.loop->post_at(Clock::now() + kRetryInterval, [weak = weak<VerbsLink>(), &path] {
      if (const auto self = weak.lock()) self->pump_later(path);
    });
  }
  return {};
}

void VerbsLink::pump_later(Path& path) {
  std::string problem;
  {
    const Lock lock(mutex_);
    path.retry_planned = false;
    problem = pump(path);
  }
  if (!problem.empty()) lose_path(path, problem);
}

void VerbsLink::on_control(uint32_t events) {
  if (closing()) {
    socket_.socket().unwatch();
    return;
  }
  FrameSocket::Failure failure;
  if (events & EPOLLOUT) failure = socket_.socket().flush();
  if (!failure) failure = receive_control();
  if (failure) fail(*failure);
}

ibv::ControlSocket::Failure VerbsLink::receive_control() {
  try {
    return socket_.receive(
        [this](std::span<const std::byte> message) {
          sink().on_message(*this, message);
          return !closing();
        },
        [this](const ibv::PathMessage& message) {
          on_path_message(message);
          return !closing();
        });
  } catch (const Error& error) {
    return error.what();
  }
}

// What the path's loop may use: while the path is in these states nobody else takes it away.
ibv::QueuePair* VerbsLink::watched_queue_pair(const Path& path) const {
  const Lock lock(mutex_);
  return path.state == Path::kOpen || path.state == Path::kDraining ? path.qp.get() : nullptr;
}

void VerbsLink::on_ready(Path& path) {
  ibv::QueuePair* qp = watched_queue_pair(path);
  if (!qp) return;
  qp->take_events();
  {
    const Lock lock(mutex_);
    ++counts_.wakeups;
  }
  poll(path);
}

// On the path's loop.
void VerbsLink::poll(Path& path) {
  bool armed = false;
  for (int turn = 0; turn < kPollsPerTurn; ++turn) {
    ibv::QueuePair* qp = watched_queue_pair(path);
    if (!qp) return;
    if (poll_some(path)) {
      armed = false;
    } else if (armed) {
      return;
    } else if (watched_queue_pair(path)) {
      if (const int error = qp->arm()) {
        lose_path(path, "no completion events any more: " + error_text(error));
        return;
      }
      armed = true;
    }
  }
  path.loop->post([weak = weak<VerbsLink>(), &path] {
    if (const auto self = weak.lock()) self->poll(path);
  });
}

// False: nothing had completed, or the path is at its end.
bool VerbsLink::poll_some(Path& path) {
  std::array<ibv::Wc, kCompletionsAtOnce> completions;
  const int count = path.qp->poll(completions);
  if (count < 0) {
    lose_path(path, "its completion queue is broken");
    return false;
  }
  Writes done;
  std::vector<std::vector<std::byte>> landed;
  std::string problem;
  bool at_end;
  uint32_t epoch;
  {
    const Lock lock(mutex_);
    counts_.completions += static_cast<uint64_t>(count);
    for (int i = 0; i < count; ++i) {
      const ibv::Wc& completion = completions[static_cast<size_t>(i)];
      std::string found;
      if (completion.wr_id == kMarker) {
        path.marker_seen = true;
      } else if (completion.wr_id & ibv::SendQueue::kIdBit) {
        found = handle_send(path, completion, done);
      } else {
        found = handle_receive(path, completion, landed);
      }
      if (problem.empty()) problem = std::move(found);
    }
    if (problem.empty()) problem = pump(path);
    at_end = drained(path);
    epoch = path.epoch;
  }
  report(done);
  for (const auto& notice : landed) {
    if (closing()) break;
    sink().on_landed(*this, notice, true);
  }
  if (!problem.empty()) lose_path(path, problem);
  if (at_end) finish_drain(path, epoch);
  return count > 0;
}

// With mutex_ held. Returns what ends the path, or nothing.
std::string VerbsLink::handle_send(Path& path, const ibv::Wc& completion, Writes& done) {
  if (completion.status == ibv::kSuccess) {
    path.attempts = 0;
    path.sends->complete(completion.wr_id, done);
    return {};
  }
  return std::string("a write failed: ") +
         fabric_->rails[path.rail].nic->library->wc_status_str(completion.status) +
         " (vendor error " + std::to_string(completion.vendor_err) + ")";
}

std::string VerbsLink::handle_receive(Path& path, const ibv::Wc& completion,
                                      std::vector<std::vector<std::byte>>& landed) {
  --path.receives_posted;
  if (completion.status != ibv::kSuccess) {
    return std::string("receiving failed: ") +
           fabric_->rails[path.rail].nic->library->wc_status_str(completion.status);
  }
  const uint64_t index = completion.wr_id;
  if (!reader_ || index >= path.qp->receives() || completion.byte_len > ibv::kNoticeBytes) {
    fail("the peer sent something that is no notice");
    return {};
  }
  try {
    auto arrived = inbox_.take({path.qp->receive_buffer(index), completion.byte_len});
    path.landed += arrived.stripe;
    if (arrived.write) landed.push_back(std::move(arrived.notice));
  } catch (const Error& error) {
    fail(error.what());
    return {};
  }
  if (path.state != Path::kOpen) return {};
  if (const int error = path.qp->post_receive(index)) {
    return "posting a receive failed: " + error_text(error);
  }
  ++path.receives_posted;
  return {};
}

void VerbsLink::report(const Writes& done) {
  for (const auto& write : done) {
    write->from.reset();  // the source may be unmapped from on_written() on
    sink().on_written(*this, write->token, !write->failed);
  }
}

}  // namespace kvxfer
