#include "transport/ucx/fabric.h"

#include <algorithm>
#include <array>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <set>
#include <sstream>
#include <string_view>
#include <utility>

#include "base/unique_fd.h"
#include "kvxfer/status.h"

namespace kvxfer {
namespace ucp {
namespace {

// Over these the peer's process writes into our memory by its addresses, and nothing of ours could
// stop it: not even unmapping, for the addresses are used again.
constexpr std::array<std::string_view, 3> kPastOurFence{"cma", "knem", "xpmem"};

std::string transport_of(const std::string& resource) {
  return resource.substr(0, resource.find('/'));
}

bool past_our_fence(const std::string& resource) {
  return std::find(kPastOurFence.begin(), kPastOurFence.end(), transport_of(resource)) !=
         kPastOurFence.end();
}

template <typename Names>
std::string joined(const Names& names, const char* separator) {
  std::string text;
  for (const std::string& name : names) text += (text.empty() ? "" : separator) + name;
  return text;
}

}  // namespace

void check(const Library& library, Status status, const std::string& what) {
  if (status == kOk) return;
  throw Error(StatusCode::kNoResources,
              "UCX " + library.version + ": " + what + ": " + library.status_string(status));
}

std::string printed(const std::function<void(FILE*)>& print) {
  char* text = nullptr;
  size_t size = 0;
  FILE* stream = ::open_memstream(&text, &size);
  if (!stream) return {};
  print(stream);
  std::fclose(stream);
  std::string copy(text, size);
  std::free(text);
  return copy;
}

bool is_rdma(const std::string& resource) {
  constexpr std::array<std::string_view, 5> kKinds{"rc_", "dc_", "ud_", "gga_", "srd/"};
  return std::any_of(kKinds.begin(), kKinds.end(),
                     [&](std::string_view kind) { return resource.starts_with(kind); });
}

bool can_put(const std::string& lane) { return lane.starts_with("rc_") || lane.starts_with("dc_"); }

}  // namespace ucp

UcxFabric::State::State(IoThreads* io, const UcxOptions& options)
    : threads(io), library(ucp::Library::load(options.libraries)), generation_(fork_generation()) {
  const std::set<std::string> auxiliary = open("");
  const bool can_put = std::any_of(resources.begin(), resources.end(),
                                   [](const auto& resource) { return ucp::can_put(resource); });
  std::set<std::string> allowed;
  bool all = true;
  for (const std::string& resource : resources) {
    if (ucp::past_our_fence(resource) || (options.rdma_only && !ucp::is_rdma(resource))) {
      all = false;
      continue;
    }
    const std::string name = ucp::transport_of(resource);
    allowed.insert(auxiliary.contains(name) ? name + ":aux" : name);
  }
  if (all && !can_put) return;
  const std::string found = ucp::joined(resources, ", ");
  library->cleanup(std::exchange(context, nullptr));
  if (allowed.empty() && options.rdma_only) {
    throw Error(StatusCode::kNoResources, "UCX " + library->version + " (" + library->path +
                                              ") has only " + found + " here, and that is no RDMA");
  }
  if (allowed.empty()) {
    throw Error(StatusCode::kNoResources,
                "the ucx transport cannot be used: UCX_TLS leaves nothing but cma, knem and xpmem, "
                "by which a peer could write late into memory that is something else by then");
  }
  puts = can_put;
  open(all ? "" : ucp::joined(allowed, ","));
}

std::set<std::string> UcxFabric::State::open(const std::string& transports) {
  ucp::Config* config = nullptr;
  ucp::check(*library, library->config_read(nullptr, nullptr, &config), "its settings");
  if (!transports.empty()) library->config_modify(config, "TLS", transports.c_str());
  // All memory is registered ahead. Without the cache, which older versions do not have here, UCX
  // has no need to patch the process's mmap() and munmap().
  if (!std::getenv("UCX_RCACHE_ENABLE")) library->config_modify(config, "RCACHE_ENABLE", "n");
  if (!puts) {
    // Both sides introduce themselves while they connect, not at the first large message: 1.13
    // aborts a reader whose writer is gone when it answers ("got REP message").
    library->config_modify(config, "RESOLVE_REMOTE_EP_ID", "y");
    // When a connection fails under a message that is sent in place, 1.13 completes it twice, and
    // aborts where it is built to notice ("comp->count > 0").
    library->config_modify(config, "ZCOPY_THRESH", "inf");
  }
  ucp::Params params;
  params.field_mask = ucp::Params::kFeatures | ucp::Params::kMtWorkersShared;
  params.features = ucp::kFeatureAm | ucp::kFeatureWakeup | (puts ? ucp::kFeatureRma : 0);
  params.mt_workers_shared = 1;
  const ucp::Status status =
      library->init_version(ucp::kApiMajor, ucp::kApiMinor, &params, config, &context);
  library->config_release(config);
  ucp::check(*library, status, "none of its transports can be used");

  // Lines as "#  resource 2  :  md 1  dev 2  flags -- tcp/lo", and "a-" of what is auxiliary.
  std::istringstream text(
      ucp::printed([this](FILE* stream) { library->context_print_info(context, stream); }));
  resources.clear();
  std::set<std::string> auxiliary;
  for (std::string line; std::getline(text, line);) {
    std::istringstream words(line.substr(std::min(line.find("flags "), line.size())));
    std::string flags, resource;
    if (!(words >> flags >> flags >> resource)) continue;
    resources.push_back(resource);
    if (flags.starts_with('a')) auxiliary.insert(ucp::transport_of(resource));
  }
  return auxiliary;
}

UcxFabric::State::~State() {
  if (context && generation_ == fork_generation()) library->cleanup(context);
}

std::shared_ptr<UcxMemory> UcxFabric::State::register_memory(std::span<std::byte> memory,
                                                             std::shared_ptr<void> owner) {
  if (memory.empty()) throw Error(StatusCode::kInvalid, "ucx: there is no memory to register");
  auto registered = std::make_shared<UcxMemory>(shared_from_this(), memory, std::move(owner));
  const std::lock_guard lock(mutex_);
  std::erase_if(memories_, [](const auto& entry) { return entry.second.expired(); });
  memories_[memory.data()] = registered;
  return registered;
}

std::shared_ptr<UcxMemory> UcxFabric::State::memory_of(std::span<const std::byte> source) {
  const std::lock_guard lock(mutex_);
  const auto after = memories_.upper_bound(source.data());
  if (after == memories_.begin()) return nullptr;
  auto known = std::prev(after)->second.lock();
  return known && known->holds(source) ? known : nullptr;
}

UcxMemory::UcxMemory(std::shared_ptr<UcxFabric::State> fabric, std::span<std::byte> memory,
                     std::shared_ptr<void> owner)
    : owner_(std::move(owner)),
      fabric_(std::move(fabric)),
      memory_(memory),
      generation_(fork_generation()) {
  if (!fabric_->puts) return;
  ucp::MemMapParams params;
  params.field_mask = ucp::MemMapParams::kAddress | ucp::MemMapParams::kLength |
                      ucp::MemMapParams::kProt | ucp::MemMapParams::kMemoryType;
  params.address = memory.data();
  params.length = memory.size();
  params.prot = ucp::kLocalRead | ucp::kLocalWrite | ucp::kRemoteWrite;
  params.memory_type = ucp::kHostMemory;
  ucp::check(*fabric_->library, fabric_->library->mem_map(fabric_->context, &params, &handle_),
             "registering " + std::to_string(memory.size()) +
                 " bytes, which may need a higher limit of locked memory (ulimit -l unlimited)");
}

UcxMemory::~UcxMemory() {
  if (handle_ && generation_ == fork_generation()) {
    fabric_->library->mem_unmap(fabric_->context, handle_);
  }
}

std::string UcxMemory::rkey() const {
  if (!handle_) return {};
  void* buffer = nullptr;
  size_t size = 0;
  ucp::check(*fabric_->library,
             fabric_->library->rkey_pack(fabric_->context, handle_, &buffer, &size),
             "the key of a registration");
  std::string key(static_cast<const char*>(buffer), size);
  fabric_->library->rkey_buffer_release(buffer);
  return key;
}

UcxFabric::UcxFabric(IoThreads& threads, const UcxOptions& options)
    : state_(std::make_shared<State>(&threads, options)) {}

UcxFabric::~UcxFabric() = default;

std::shared_ptr<UcxMemory> UcxFabric::register_memory(std::span<std::byte> memory,
                                                      std::shared_ptr<void> owner) {
  return state_->register_memory(memory, std::move(owner));
}

UcxInfo describe_ucx(const UcxOptions& options) {
  const UcxFabric::State state(nullptr, options);
  return {state.library->path, state.library->version, state.resources,
          std::any_of(state.resources.begin(), state.resources.end(), ucp::is_rdma)};
}

}  // namespace kvxfer
