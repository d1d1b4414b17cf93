#include "engine/core.h"

#include "base/event_loop.h"

namespace kvxfer {

AgentCore::AgentCore(const AgentOptions& agent_options)
    : options(agent_options), fork_generation(kvxfer::fork_generation()) {
  if (options.name.empty()) throw Error(StatusCode::kInvalid, "an agent needs a name");
  if (options.slot_bytes < 4096) {
    throw Error(StatusCode::kInvalid,
                "chunk_bytes is " + std::to_string(options.slot_bytes) + ": at least 4096");
  }
  if (options.copied_chunk_bytes < 4096 || options.copied_window == 0) {
    throw Error(StatusCode::kInvalid,
                "tcp_chunk_bytes must be at least 4096, tcp_window at least 1");
  }
  if (options.window == 0 || options.threads == 0 || options.bulk_threads == 0) {
    throw Error(StatusCode::kInvalid, "window, threads and tcp_streams must be at least 1");
  }
  if (!(options.heartbeat_interval > 0) ||
      options.heartbeat_timeout < 2 * options.heartbeat_interval) {
    throw Error(StatusCode::kInvalid,
                "heartbeat_timeout must be at least twice heartbeat_interval, and both positive");
  }
  pool = std::make_unique<ThreadPool>(options.threads, "kvx-work");
  io = std::make_unique<IoThreads>(options.bulk_threads);
}

AgentCore::~AgentCore() = default;

void AgentCore::check_fork() const {
  if (fork_generation != kvxfer::fork_generation()) {
    throw Error(StatusCode::kClosed,
                "agent '" + options.name +
                    "' was made before a fork() and does not exist in the child: make a new "
                    "agent there, or start the child with spawn instead of fork");
  }
}

void AgentCore::check_open() const {
  if (closed) throw Error(StatusCode::kClosed, "agent '" + options.name + "' is closed");
}

Guard::~Guard() {
  if (core_.deferred.empty() || core_.draining || !core_.io->control()->in_loop()) return;
  core_.draining = true;  // jobs hold Guards of their own: the outermost one runs them all
  while (!core_.deferred.empty()) {
    auto job = std::move(core_.deferred.front());
    core_.deferred.pop_front();
    lock_.unlock();
    job();
    lock_.lock();
  }
  core_.draining = false;
}

void run_job(AgentCore& core, uint64_t bytes, std::function<void()> job) {
  if (bytes <= core.options.inline_bytes && core.io->control()->in_loop()) {
    core.deferred.push_back(std::move(job));
  } else {
    core.pool->submit(std::move(job));
  }
}

void set_timer(AgentCore& core, std::optional<Timers::Id>& timer, TimePoint when,
               std::function<void()> action) {
  clear_timer(core, timer);
  timer = core.timers.add(when, [&timer, action = std::move(action)] {
    timer.reset();
    action();
  });
  if (when < core.sleeping_until) core.io->control()->wake();
}

void clear_timer(AgentCore& core, std::optional<Timers::Id>& timer) {
  if (timer) core.timers.cancel(*timer);
  timer.reset();
}

}  // namespace kvxfer
