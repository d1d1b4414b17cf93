#include "transport/verbs/library.h"

#include <dlfcn.h>

#include <cstdlib>

#include "kvxfer/status.h"

namespace kvxfer::ibv {
namespace {

[[noreturn]] void fail(const std::string& path, const std::string& problem) {
  throw Error(StatusCode::kNoResources,
              "the verbs transport cannot use '" + path + "': " + problem +
                  "; install rdma-core 33 or newer (Debian, Ubuntu: libibverbs1 and "
                  "ibverbs-providers) or name the library in KVXFER_VERBS_LIBRARY");
}

class Symbols {
 public:
  Symbols(void* handle, const std::string& path) : handle_(handle), path_(path) {}

  template <typename Function>
  void find(Function*& function, const char* name) const {
    find_optional(function, name);
    if (!function) fail(path_, std::string("it has no function ") + name);
  }

  template <typename Function>
  void find_optional(Function*& function, const char* name) const {
    function = reinterpret_cast<Function*>(::dlsym(handle_, name));
  }

 private:
  void* const handle_;
  const std::string& path_;
};

}  // namespace

std::shared_ptr<const Library> Library::load(const std::string& path) {
  auto library = std::make_shared<Library>();
  const char* named = std::getenv("KVXFER_VERBS_LIBRARY");
  library->path = !path.empty() ? path : named && *named ? named : "libibverbs.so.1";

  void* handle = ::dlopen(library->path.c_str(), RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE);
  if (!handle) {
    const char* problem = ::dlerror();
    fail(library->path, problem ? problem : "dlopen failed");
  }
  const Symbols symbols(handle, library->path);
  symbols.find(library->get_device_list, "ibv_get_device_list");
  symbols.find(library->free_device_list, "ibv_free_device_list");
  symbols.find(library->get_device_name, "ibv_get_device_name");
  symbols.find(library->open_device, "ibv_open_device");
  symbols.find(library->close_device, "ibv_close_device");
  symbols.find(library->query_device, "ibv_query_device");
  symbols.find(library->query_port, "ibv_query_port");
  symbols.find(library->query_gid_ex, "_ibv_query_gid_ex");
  symbols.find(library->get_async_event, "ibv_get_async_event");
  symbols.find(library->ack_async_event, "ibv_ack_async_event");
  symbols.find(library->alloc_pd, "ibv_alloc_pd");
  symbols.find(library->dealloc_pd, "ibv_dealloc_pd");
  symbols.find(library->reg_mr_iova2, "ibv_reg_mr_iova2");
  symbols.find_optional(library->reg_dmabuf_mr, "ibv_reg_dmabuf_mr");
  symbols.find(library->dereg_mr, "ibv_dereg_mr");
  symbols.find(library->create_comp_channel, "ibv_create_comp_channel");
  symbols.find(library->destroy_comp_channel, "ibv_destroy_comp_channel");
  symbols.find(library->create_cq, "ibv_create_cq");
  symbols.find(library->destroy_cq, "ibv_destroy_cq");
  symbols.find(library->get_cq_event, "ibv_get_cq_event");
  symbols.find(library->ack_cq_events, "ibv_ack_cq_events");
  symbols.find(library->create_qp, "ibv_create_qp");
  symbols.find(library->modify_qp, "ibv_modify_qp");
  symbols.find(library->destroy_qp, "ibv_destroy_qp");
  symbols.find(library->wc_status_str, "ibv_wc_status_str");

  // The rings of queue pairs must not become copy-on-write in a parent that forks. Has to come
  // before all else, may be repeated, and does nothing where the kernel sees to it (5.12 and
  // newer).
  int (*fork_init)() = nullptr;
  symbols.find(fork_init, "ibv_fork_init");
  fork_init();
  return library;
}

}  // namespace kvxfer::ibv
