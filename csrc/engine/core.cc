#include "engine/core.h"

#include <algorithm>

#include "base/event_loop.h"
#include "base/thread.h"
#include "kvxfer/digest.h"
#include "kvxfer/pack.h"

namespace kvxfer {
namespace {

const AgentOptions& checked(const AgentOptions& options) {
  prepare_to_throw();
  const auto require = [](bool fine, const std::string& what) {
    if (!fine) throw Error(StatusCode::kInvalid, what);
  };
  require(!options.name.empty() && options.name.size() <= wire::kMaxName,
          "an agent's name has 1 to " + std::to_string(wire::kMaxName) + " bytes");
  require(options.slot_bytes >= wire::kMinChunk && options.slot_bytes <= kMaxWrite,
          "chunk_bytes is " + std::to_string(options.slot_bytes) + ": from " +
              std::to_string(wire::kMinChunk) + " to " + std::to_string(kMaxWrite));
  require(options.copied_chunk_bytes >= wire::kMinChunk && options.copied_window > 0,
          "tcp_chunk_bytes must be at least " + std::to_string(wire::kMinChunk) +
              ", tcp_window at least 1");
  require(options.window > 0 && options.threads > 0 && options.bulk_threads > 0,
          "window, threads and tcp_threads must be at least 1");
  require(
      options.heartbeat_interval > 0 && options.heartbeat_timeout >= 2 * options.heartbeat_interval,
      "heartbeat_timeout must be at least twice heartbeat_interval, and both positive");
  require(options.gpu_timeout > 0, "gpu_timeout must be positive");
  simd_variant();  // throws for a KVXFER_SIMD that cannot run, here and not in the first transfer
  return options;
}

}  // namespace

AgentCore::AgentCore(const AgentOptions& agent_options)
    : options(checked(agent_options)),
      fork_generation(kvxfer::fork_generation()),
      pool(std::make_unique<ThreadPool>(options.threads, "kvx-work")),
      io(std::make_unique<IoThreads>(options.bulk_threads)) {}

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

void run_job(AgentCore& core, const Cache& cache, uint64_t bytes, std::function<void()> job) {
  if (cache.gpu) {
    cache.gpu->pool->submit(std::move(job));
  } else if (bytes <= core.options.inline_bytes && core.io->control()->in_loop()) {
    core.deferred.push_back(std::move(job));
  } else {
    core.pool->submit(std::move(job));
  }
}

Duration to_duration(double seconds) {
  constexpr double kLongest = 1e8;  // about three years: "for ever" that a clock can hold
  return std::chrono::duration_cast<Duration>(
      std::chrono::duration<double>(std::clamp(seconds, 0.0, kLongest)));
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
