// For LD_PRELOAD where UCX's reliable connections go over soft-RoCE, which says again with each
// packet for a closed queue pair that its last work request was reached. Adapters say it once, and
// UCX aborts the process otherwise ("Assertion `wait_ctx->cb_id == (-1)' failed", 1.13.1).

#include <dlfcn.h>

#include <mutex>
#include <set>

#include "transport/verbs/abi.h"

namespace ibv = kvxfer::ibv;

namespace {

constexpr uint32_t kLastWqeReached = 16;

std::mutex mutex;
std::set<ibv::Qp*> told;  // guarded by mutex; queue pairs

// Each has an older version for programs of before 2007, with other structures.
template <typename Function>
Function* real(Function*, const char* name) {
  return reinterpret_cast<Function*>(
      ::dlvsym(::dlopen("libibverbs.so.1", RTLD_NOW), name, "IBVERBS_1.1"));
}

}  // namespace

extern "C" {

using Acknowledge = void(ibv::AsyncEvent*);

int ibv_get_async_event(ibv::Context* context, ibv::AsyncEvent* event) {
  static const auto get = real(&ibv_get_async_event, "ibv_get_async_event");
  static const auto acknowledge = real(static_cast<Acknowledge*>(nullptr), "ibv_ack_async_event");
  while (true) {
    if (const int result = get(context, event); result != 0) return result;
    if (event->event_type != kLastWqeReached) return 0;
    {
      const std::lock_guard lock(mutex);
      if (told.insert(event->element.qp).second) return 0;
    }
    acknowledge(event);
  }
}

int ibv_destroy_qp(ibv::Qp* qp) {
  static const auto destroy = real(&ibv_destroy_qp, "ibv_destroy_qp");
  const int result = destroy(qp);
  const std::lock_guard lock(mutex);
  told.erase(qp);
  return result;
}

}  // extern "C"
