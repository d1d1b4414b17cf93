// Caches that links register: pinned and unpinned on a thread of its own, for both take seconds
// where the cache is large.

#include <utility>

#include "engine/core.h"

namespace kvxfer {
namespace {

void unpinned(AgentCore& core, Cache& cache) {
  Guard guard(core);
  --cache.pinned;
  core.peers_changed.notify_all();
}

// Whoever drops the last reference, wherever, has the registrar unpin the memory.
std::shared_ptr<DirectMemory> unpin_later(AgentCore& core, const std::shared_ptr<Cache>& cache,
                                          std::shared_ptr<DirectMemory> memory) {
  DirectMemory* const seen = memory.get();
  return {seen, [&core, registrar = core.registrar, cache,
                 memory = std::move(memory)](DirectMemory*) mutable {
            try {
              // close() runs all jobs: there is a core as long as there are any.
              if (registrar->submit([&core, cache, memory = std::move(memory)]() mutable {
                    memory.reset();
                    unpinned(core, *cache);
                  })) {
                return;
              }
            } catch (const std::bad_alloc&) {
            }
            --cache->pinned;  // has been dropped here
          }};
}

Registered register_host(const Cache& cache, Link& link, Link::DirectUse use) {
  std::vector<DirectSpan> spans;
  for (const auto& memory : cache.memory) spans.push_back({memory});
  return {link.register_memory(spans, use), {}};
}

// Without the mutex.
Registered pin(AgentCore& core, const std::shared_ptr<Cache>& cache, Link& link,
               Link::DirectUse use) {
  try {
    Registered made =
        cache->gpu ? register_gpu(core, *cache, link, use) : register_host(*cache, link, use);
    ++cache->pinned;
    made.memory = unpin_later(core, cache, std::move(made.memory));
    return made;
  } catch (const std::exception& error) {
    return {nullptr, error.what()};
  }
}

}  // namespace

bool pin_cache(AgentCore& core, const std::shared_ptr<Cache>& cache,
               const std::shared_ptr<Peer>& peer, Link::DirectUse use,
               std::function<void(Registered)> then) {
  ++cache->pinned;
  if (core.registrar->submit([&core, cache, peer, use, then = std::move(then)] {
        then(pin(core, cache, *peer->link, use));
        unpinned(core, *cache);
      })) {
    return true;
  }
  --cache->pinned;
  return false;
}

std::vector<Registered> take_registered(Peer& peer, std::optional<CacheId> cache) {
  std::vector<Registered> taken;
  for (auto* all : {&peer.targets, &peer.sources}) {
    std::erase_if(*all, [&](auto& entry) {
      if (cache && (entry.first != *cache || !entry.second.ready())) return false;
      taken.push_back(std::move(entry.second));
      return true;
    });
  }
  return taken;
}

}  // namespace kvxfer
