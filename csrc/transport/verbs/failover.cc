// How paths of a VerbsLink end, alone or with it, and come back.

#include <algorithm>
#include <utility>

#include "kvxfer/status.h"
#include "transport/verbs/verbs_link.h"

namespace kvxfer {
namespace {

// What was under way is thrown back at once when a queue pair has failed. After this time it is
// destroyed anyway, which ends everything.
constexpr auto kDrainTime = std::chrono::seconds(1);
// The peer answers as fast as it can drain its own queue pair.
constexpr auto kAnswerTime = std::chrono::seconds(10);
constexpr auto kFirstReopening = std::chrono::milliseconds(500);
constexpr uint32_t kMostDoublings = 5;

}  // namespace

std::string VerbsLink::path_text(const Path& path) const {
  return fabric_->rails[path.rail].name() + " - " + remote_.rails[path.remote_rail].name;
}

size_t VerbsLink::open_paths() const {
  return static_cast<size_t>(std::count_if(
      paths_.begin(), paths_.end(), [](const auto& path) { return path->state == Path::kOpen; }));
}

bool VerbsLink::drained(const Path& path) const {
  return path.state == Path::kDraining && path.marker_seen && path.receives_posted == 0;
}

void VerbsLink::tell(ibv::PathMessage::Kind kind, const Path& path) {
  ibv::PathMessage message;
  message.kind = kind;
  message.path = static_cast<uint16_t>(path.index);
  {
    const Lock lock(mutex_);
    message.epoch = path.epoch;
    message.landed = path.landed;
    if (path.qp) message.qp = path.qp->address();
    message.reason = path.problem;
  }
  if (const auto failure = socket_.send(message)) fail(*failure);
}

void VerbsLink::on_port_down(size_t nic, uint8_t port) {
  std::vector<Path*> affected;
  {
    const Lock lock(mutex_);
    size_t others = 0;
    for (const auto& path : paths_) {
      const ibv::Rail& rail = fabric_->rails[path->rail];
      if (path->state != Path::kOpen) continue;
      if (rail.nic_index == nic && rail.port == port) {
        affected.push_back(path.get());
      } else {
        ++others;
      }
    }
    // The last rail may come back before the retries are used up.
    if (others == 0) return;
  }
  for (Path* path : affected) lose_path(*path, "the port went down");
}

// Those whose queue pair on the adapter is one of the affected.
void VerbsLink::lose_paths(size_t nic, const std::string& problem,
                           const std::function<bool(const ibv::QueuePair&)>& affected) {
  std::vector<Path*> lost;
  {
    const Lock lock(mutex_);
    for (const auto& path : paths_) {
      if (path->state == Path::kOpen && fabric_->rails[path->rail].nic_index == nic &&
          affected(*path->qp)) {
        lost.push_back(path.get());
      }
    }
  }
  for (Path* path : lost) lose_path(*path, problem);
}

void VerbsLink::on_queue_pair_error(size_t nic, uint32_t number) {
  lose_paths(nic, "the adapter reports that the queue pair failed",
             [number](const ibv::QueuePair& qp) { return qp.number() == number; });
}

void VerbsLink::on_completion_queue_error(size_t nic, const ibv::Cq* cq) {
  lose_paths(nic, "the adapter reports that the completion queue overran",
             [cq](const ibv::QueuePair& qp) { return qp.uses(cq); });
}

void VerbsLink::on_adapter_error(size_t nic) {
  lose_paths(nic, "the adapter reports that it failed", [](const ibv::QueuePair&) { return true; });
}

// With mutex_ held.
void VerbsLink::count_failover(const Path& path) {
  ++counts_.failovers;
  last_failover_ = path_text(path) + ": " + path.problem;
}

// From any thread, without mutex_.
void VerbsLink::lose_path(Path& path, const std::string& problem) {
  bool last;
  uint32_t epoch;
  {
    const Lock lock(mutex_);
    if (path.state != Path::kOpen || path.left) return;
    path.state = Path::kDraining;
    path.problem = problem;
    epoch = path.epoch;
    last = open_paths() == 0;
    if (!last) count_failover(path);
  }
  path.loop->post([weak = weak<VerbsLink>(), &path, epoch] {
    if (const auto self = weak.lock()) self->begin_drain(path, epoch);
  });
  if (last) {
    fail_after_last_words((paths_.size() == 1 ? "its only path, " : "the last path, ") +
                          path_text(path) + ", was lost: " + problem);
  }
}

// What the peer said on the control socket before comes first: it may say why.
void VerbsLink::fail_after_last_words(const std::string& reason) {
  control().post([weak = weak<VerbsLink>(), reason] {
    const auto self = weak.lock();
    if (!self) return;
    if (!self->closing()) {
      if (const auto failure = self->receive_control()) self->fail(*failure);
    }
    self->fail(reason);
  });
}

// On the path's loop.
void VerbsLink::begin_drain(Path& path, uint32_t epoch) {
  bool flushed;
  {
    const Lock lock(mutex_);
    if (path.epoch != epoch || path.state != Path::kDraining || path.drain_begun) return;
    path.drain_begun = true;
    flushed = path.qp->flush(kMarker);
  }
  if (!flushed) {
    finish_drain(path, epoch);
    return;
  }
  path.loop->post_at(Clock::now() + kDrainTime, [weak = weak<VerbsLink>(), &path, epoch] {
    if (const auto self = weak.lock()) self->finish_drain(path, epoch);
  });
  poll(path);
}

// On the path's loop. Afterwards the queue pair is gone: nothing is sent on it or written by it.
// The path counts as draining until then, so that nobody tells the peer before.
void VerbsLink::finish_drain(Path& path, uint32_t epoch) {
  {
    const Lock lock(mutex_);
    if (path.epoch != epoch || path.state != Path::kDraining) return;
    if (std::exchange(path.drain_ends, true)) return;
  }
  path.loop->remove(path.qp->event_fd());
  while (poll_some(path)) {
  }
  std::unique_ptr<ibv::QueuePair> qp;
  {
    const Lock lock(mutex_);
    qp = std::move(path.qp);
  }
  qp.reset();
  bool asked;
  {
    const Lock lock(mutex_);
    path.state = reader_ ? Path::kClosed : Path::kAwaiting;
    asked = path.asked_to_close;
  }
  if (closing()) {
    end_path(path);
    return;
  }
  if (reader_) {
    tell(asked ? ibv::PathMessage::kLanded : ibv::PathMessage::kLost, path);
    return;
  }
  tell(ibv::PathMessage::kClose, path);
  control().post_at(Clock::now() + kAnswerTime, [weak = weak<VerbsLink>(), &path, epoch] {
    const auto self = weak.lock();
    if (!self) return;
    {
      const Lock lock(self->mutex_);
      if (path.epoch != epoch || path.state != Path::kAwaiting) return;
    }
    self->fail("the peer does not say what has arrived on the lost path " + self->path_text(path) +
               " (" + path.problem + ")");
  });
}

// On the path's loop, when the link is closing.
void VerbsLink::end_path(Path& path) {
  Writes done;
  std::unique_ptr<ibv::QueuePair> unused;
  bool drain;
  uint32_t epoch;
  {
    const Lock lock(mutex_);
    if (path.left) return;
    if (path.state == Path::kOpen) path.state = Path::kDraining;
    drain = path.state == Path::kDraining;
    epoch = path.epoch;
    if (!drain) {
      unused = std::move(path.qp);
      abandon(path, done);
      path.left = true;
    }
  }
  if (!drain) {
    unused.reset();
    report(done);
    leave();
    return;
  }
  try {
    const Lock lock(mutex_);
    if (path.watched) path.loop->remove(path.qp->event_fd());
    watch(path, true);
  } catch (const Error&) {
    finish_drain(path, epoch);
    return;
  }
  begin_drain(path, epoch);
}

// With mutex_ held.
void VerbsLink::abandon(Path& path, Writes& done) {
  if (!path.sends) return;
  for (ibv::Stripe& stripe : path.sends->take()) {
    stripe.write->failed = true;
    if (--stripe.write->stripes_left == 0) done.push_back(std::move(stripe.write));
  }
}

void VerbsLink::on_path_message(const ibv::PathMessage& message) {
  using Kind = ibv::PathMessage;
  const bool from_writer = message.kind == Kind::kClose || message.kind == Kind::kOpen;
  if (message.path >= paths_.size() || from_writer != reader_) {
    fail("the peer sent a message about a path that makes no sense");
    return;
  }
  Path& path = *paths_[message.path];
  switch (message.kind) {
    case Kind::kClose: return on_close(path, message);
    case Kind::kOpen: return on_open(path, message);
    case Kind::kLanded: return on_answer(path, message);
    case Kind::kOpened:
    case Kind::kRefused: return on_opened(path, message);
    case Kind::kLost: {
      {
        const Lock lock(mutex_);
        if (path.epoch != message.epoch) return;
      }
      return lose_path(path, "the peer says: " + message.reason);
    }
  }
}

// Reader.
void VerbsLink::on_close(Path& path, const ibv::PathMessage& message) {
  bool answer;
  {
    const Lock lock(mutex_);
    if (path.epoch != message.epoch) return fail("the peer closed a path that was not open");
    path.asked_to_close = true;
    answer = path.state == Path::kClosed;
    if (path.state == Path::kOpen) {
      path.state = Path::kDraining;
      path.problem = "the peer says: " + message.reason;
      if (open_paths() > 0) count_failover(path);
      path.loop->post([weak = weak<VerbsLink>(), &path, epoch = path.epoch] {
        if (const auto self = weak.lock()) self->begin_drain(path, epoch);
      });
    }
  }
  if (answer) tell(ibv::PathMessage::kLanded, path);
}

// Writer: the peer has said what has arrived, and that nothing will any more.
void VerbsLink::on_answer(Path& path, const ibv::PathMessage& message) {
  Writes done;
  std::string problem;
  std::vector<std::pair<Path*, std::string>> lost;
  {
    const Lock lock(mutex_);
    if (path.epoch != message.epoch || path.state != Path::kAwaiting || path.left) return;
    const uint64_t known = path.sends->completed_stripes();
    if (message.landed < known || !path.sends->acknowledge(message.landed - known, done)) {
      problem = "of " + std::to_string(known) + " acknowledged writes on " + path_text(path) +
                " the peer has seen " + std::to_string(message.landed);
    } else if (open_paths() > 0) {
      path.state = Path::kClosed;
      for (ibv::Stripe& stripe : path.sends->take()) {
        Path& other = *choose_path(stripe.size, {});
        ++next_path_;
        other.sends->add(std::move(stripe));
        if (std::string why = pump(other); !why.empty()) lost.emplace_back(&other, why);
      }
    }  // else the link is about to fail, and its end answers what is left
  }
  report(done);
  for (const auto& [other, why] : lost) lose_path(*other, why);
  if (!problem.empty()) return fail(problem);
  plan_reopening(path);
}

void VerbsLink::plan_reopening(Path& path) {
  uint32_t doublings;
  {
    const Lock lock(mutex_);
    if (path.state != Path::kClosed || path.left) return;
    doublings = std::min(path.attempts++, kMostDoublings);
  }
  control().post_at(Clock::now() + kFirstReopening * (1u << doublings),
                    [weak = weak<VerbsLink>(), &path] {
                      if (const auto self = weak.lock()) self->reopen(path);
                    });
}

// Writer, on the control loop.
void VerbsLink::reopen(Path& path) {
  if (closing()) return;
  const ibv::Rail& rail = fabric_->rails[path.rail];
  if (!rail.active()) return plan_reopening(path);
  std::unique_ptr<ibv::QueuePair> qp;
  try {
    qp = std::make_unique<ibv::QueuePair>(rail, fabric_->options);
  } catch (const Error&) {
    return plan_reopening(path);
  }
  {
    const Lock lock(mutex_);
    if (path.state != Path::kClosed || path.left) return;
    const std::string problem = path.problem;
    adopt(path, std::move(qp));
    path.problem = problem;
    ++path.epoch;
    path.state = Path::kOpening;
  }
  tell(ibv::PathMessage::kOpen, path);
}

// Reader.
void VerbsLink::on_open(Path& path, const ibv::PathMessage& message) {
  bool opened = false;
  {
    const Lock lock(mutex_);
    if (path.left) return;
    if (path.state != Path::kClosed || message.epoch <= path.epoch) {
      return fail("the peer opened a path that was open");
    }
    path.epoch = message.epoch;
    try {
      const ibv::Rail& rail = fabric_->rails[path.rail];
      if (!rail.active()) throw Error(StatusCode::kNoResources, rail.name() + " is not active");
      adopt(path, std::make_unique<ibv::QueuePair>(rail, fabric_->options));
      connect(path, message.qp);
      watch(path, false);
      path.state = Path::kOpen;
      opened = true;
    } catch (const Error& error) {
      path.qp.reset();
      path.problem = error.what();
    }
  }
  tell(opened ? ibv::PathMessage::kOpened : ibv::PathMessage::kRefused, path);
}

// Writer: the peer has a queue pair for ours, or not.
void VerbsLink::on_opened(Path& path, const ibv::PathMessage& message) {
  const bool refused = message.kind == ibv::PathMessage::kRefused;
  bool close = false;
  {
    const Lock lock(mutex_);
    if (path.state != Path::kOpening || path.epoch != message.epoch || path.left) return;
    if (!refused) {
      try {
        connect(path, message.qp);
        watch(path, false);
        path.state = Path::kOpen;
        path.problem.clear();
      } catch (const Error&) {
        close = true;
      }
    }
    if (refused || close) {
      path.qp.reset();
      path.state = refused ? Path::kClosed : Path::kAwaiting;
    }
  }
  if (close) tell(ibv::PathMessage::kClose, path);
  if (refused) plan_reopening(path);
}

}  // namespace kvxfer
