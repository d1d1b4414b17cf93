#include "transport/ucx/library.h"

#include <dlfcn.h>

#include <cstdlib>
#include <filesystem>
#include <system_error>

#include "kvxfer/status.h"

namespace kvxfer::ucp {
namespace {

namespace fs = std::filesystem;

constexpr const char* kName = "libucp.so.0";
constexpr int kHow = RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE;

[[noreturn]] void fail(const std::string& problem) {
  throw Error(StatusCode::kNoResources, "the ucx transport cannot be used: " + problem);
}

// What `function` comes from.
fs::path file_of(const void* function) {
  Dl_info info{};
  if (::dladdr(function, &info) == 0 || !info.dli_fname) return {};
  std::error_code ignored;
  const fs::path real = fs::canonical(info.dli_fname, ignored);
  return real.empty() ? fs::path(info.dli_fname) : real;
}

// Loads a libucp by its path. What it is made of comes first and from the same folder: the loader
// would take what it finds elsewhere under the same name, of whatever version. Lazily, for libucm
// calls a function of libucs, which needs libucm.
void* load_file(const fs::path& path) {
  for (const char* part : {"libucm.so.0", "libucs.so.0", "libuct.so.0"}) {
    ::dlopen((path.parent_path() / part).c_str(), RTLD_LAZY | RTLD_LOCAL | RTLD_NODELETE);
  }
  return ::dlopen(path.c_str(), kHow);
}

std::string last_problem() {
  const char* problem = ::dlerror();
  return problem ? problem : "it cannot be loaded";
}

void* find(const std::vector<std::string>& last_resort) {
  if (void* loaded = ::dlopen(kName, kHow | RTLD_NOLOAD)) return loaded;
  // UCX reads these while it is loaded. It would handle SIGHUP and the signals of crashes from then
  // on, and report on standard output.
  ::setenv("UCX_DEBUG_SIGNO", "0", 0);
  ::setenv("UCX_HANDLE_ERRORS", "none", 0);
  ::setenv("UCX_LOG_FILE", "stderr", 0);
  // What is copied to be sent over sockets goes out in pieces of so much. UCX's own 8 KiB take
  // twice the time.
  ::setenv("UCX_TCP_TX_SEG_SIZE", "64k", 0);
  if (const char* named = std::getenv("KVXFER_UCX_PATH"); named && *named) {
    std::error_code ignored;
    fs::path path = fs::absolute(named, ignored);
    if (fs::is_directory(path, ignored)) path /= kName;
    if (void* handle = load_file(path)) return handle;
    fail(std::string("KVXFER_UCX_PATH is '") + named + "': " + last_problem());
  }
  if (void* handle = ::dlopen(kName, kHow)) return handle;
  const std::string problem = last_problem();
  for (const std::string& path : last_resort) {
    if (void* handle = load_file(path)) return handle;
  }
  fail(problem +
       "; install UCX (Debian, Ubuntu: libucx0; without RDMA: pip install 'kvxfer[ucx]') or name "
       "its folder in KVXFER_UCX_PATH");
}

template <typename Function>
void resolve(void* handle, Function*& function, const char* name) {
  function = reinterpret_cast<Function*>(::dlsym(handle, name));
  if (!function) {
    fail("'" + std::string(kName) + "' has no function " + name +
         ": it is older than 1.13; name the folder of a newer one in KVXFER_UCX_PATH");
  }
}

}  // namespace

std::shared_ptr<const Library> Library::load(const std::vector<std::string>& last_resort) {
  void* handle = find(last_resort);
  auto library = std::make_shared<Library>();
  resolve(handle, library->get_version, "ucp_get_version");
  const fs::path path = file_of(reinterpret_cast<void*>(library->get_version));
  unsigned major = 0, minor = 0, release = 0;
  library->get_version(&major, &minor, &release);
  library->path = path.string();
  library->version =
      std::to_string(major) + "." + std::to_string(minor) + "." + std::to_string(release);
  const std::string found = "'" + library->path + "' is UCX " + library->version;
  if (major != kApiMajor || minor < kApiMinor) {
    fail(found + ", and 1.13 or a later 1.x is needed: name the folder of one in KVXFER_UCX_PATH");
  }
  for (const char* name : {"ucs_status_string", "uct_query_components", "ucm_set_event_handler"}) {
    const fs::path part = file_of(::dlsym(handle, name));
    if (part.empty() || part.parent_path() == path.parent_path()) continue;
    fail(found + ", but it runs on '" + part.string() +
         "': two copies of UCX are mixed in this process; leave one of them out of "
         "LD_LIBRARY_PATH, or name the folder of the right one in KVXFER_UCX_PATH");
  }
  resolve(handle, library->lib_query, "ucp_lib_query");
  LibAttr attr;
  attr.field_mask = LibAttr::kMaxThreadLevel;
  if (library->lib_query(&attr) != kOk || attr.max_thread_level != kThreadMulti) {
    fail(found + ", built without --enable-mt, and several threads would use it: name the folder " +
         "of one built with it in KVXFER_UCX_PATH (of HPC-X, its folder mt)");
  }
  resolve(handle, library->status_string, "ucs_status_string");
  resolve(handle, library->config_read, "ucp_config_read");
  resolve(handle, library->config_modify, "ucp_config_modify");
  resolve(handle, library->config_release, "ucp_config_release");
  resolve(handle, library->init_version, "ucp_init_version");
  resolve(handle, library->cleanup, "ucp_cleanup");
  resolve(handle, library->context_print_info, "ucp_context_print_info");
  resolve(handle, library->mem_map, "ucp_mem_map");
  resolve(handle, library->mem_unmap, "ucp_mem_unmap");
  resolve(handle, library->rkey_pack, "ucp_rkey_pack");
  resolve(handle, library->rkey_buffer_release, "ucp_rkey_buffer_release");
  resolve(handle, library->worker_create, "ucp_worker_create");
  resolve(handle, library->worker_destroy, "ucp_worker_destroy");
  resolve(handle, library->worker_query, "ucp_worker_query");
  resolve(handle, library->worker_release_address, "ucp_worker_release_address");
  resolve(handle, library->worker_get_efd, "ucp_worker_get_efd");
  resolve(handle, library->worker_arm, "ucp_worker_arm");
  resolve(handle, library->worker_progress, "ucp_worker_progress");
  resolve(handle, library->worker_set_am_recv_handler, "ucp_worker_set_am_recv_handler");
  resolve(handle, library->ep_create, "ucp_ep_create");
  resolve(handle, library->ep_close_nbx, "ucp_ep_close_nbx");
  resolve(handle, library->ep_flush_nbx, "ucp_ep_flush_nbx");
  resolve(handle, library->ep_print_info, "ucp_ep_print_info");
  resolve(handle, library->ep_evaluate_perf, "ucp_ep_evaluate_perf");
  resolve(handle, library->ep_rkey_unpack, "ucp_ep_rkey_unpack");
  resolve(handle, library->rkey_destroy, "ucp_rkey_destroy");
  resolve(handle, library->put_nbx, "ucp_put_nbx");
  resolve(handle, library->am_send_nbx, "ucp_am_send_nbx");
  resolve(handle, library->am_data_release, "ucp_am_data_release");
  resolve(handle, library->request_free, "ucp_request_free");
  return library;
}

}  // namespace kvxfer::ucp
