// The calls of libibverbs about devices, ports and memory.

#include <arpa/inet.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>

#include "fake_world.h"

using namespace fake_verbs::detail;

extern "C" {

int ibv_fork_init() { return 0; }

ibv::Device** ibv_get_device_list(int* count) {
  World& all = world();
  const std::lock_guard lock(all.mutex);
  if (const int error = all.injected("get_device_list")) return fail<ibv::Device*>(error);
  auto** list = new ibv::Device*[all.handles.size() + 1]();
  for (size_t i = 0; i < all.handles.size(); ++i) list[i] = &all.handles[i];
  *count = static_cast<int>(all.handles.size());
  return list;
}

void ibv_free_device_list(ibv::Device** list) { delete[] list; }

const char* ibv_get_device_name(ibv::Device* device) { return device->facts->name.c_str(); }

ibv::Context* ibv_open_device(ibv::Device* device) {
  World& all = world();
  const std::lock_guard lock(all.mutex);
  if (const int error = all.injected("open_device")) return fail<ibv::Context>(error);
  auto* context = new Context{};
  context->device = device;
  context->facts = device->facts;
  set_data_path(context->ops);
  context->async_fd = ::eventfd(0, EFD_CLOEXEC | EFD_SEMAPHORE);
  context->cmd_fd = -1;
  all.contexts.insert(context);
  return context;
}

int ibv_close_device(ibv::Context* raw) {
  World& all = world();
  const std::lock_guard lock(all.mutex);
  auto* context = static_cast<Context*>(raw);
  for (const ibv::Pd* pd : all.pds) {
    if (pd->context == raw) all.violation("a device closed with a protection domain left");
  }
  all.contexts.erase(context);
  ::close(context->async_fd);
  delete context;
  return 0;
}

int ibv_query_device(ibv::Context* raw, ibv::DeviceAttr* attr) {
  World& all = world();
  const std::lock_guard lock(all.mutex);
  if (const int error = all.injected("query_device")) return error;
  const fake_verbs::Device& facts = *static_cast<Context*>(raw)->facts;
  *attr = {};
  attr->max_mr_size = facts.max_mr_size;
  attr->max_qp_wr = facts.max_qp_wr;
  attr->max_cqe = facts.max_cqe;
  attr->max_srq = facts.max_srq;
  attr->max_sge = 1;
  attr->phys_port_cnt = static_cast<uint8_t>(facts.ports.size());
  return 0;
}

int ibv_query_port(ibv::Context* raw, uint8_t number, ibv::PortAttr* attr) {
  World& all = world();
  const std::lock_guard lock(all.mutex);
  if (const int error = all.injected("query_port")) return error;
  const fake_verbs::Port& port = static_cast<Context*>(raw)->facts->ports.at(number - 1u);
  *attr = {};
  attr->state = port.active ? ibv::kPortActive : ibv::kPortDown;
  attr->max_mtu = attr->active_mtu = port.mtu;
  attr->gid_tbl_len = static_cast<int>(port.gids.size()) + 3;  // some places are empty
  attr->max_msg_sz = port.max_message;
  attr->lid = port.lid;
  attr->active_width = port.width;
  attr->active_speed = port.speed;
  attr->link_layer = port.infiniband ? ibv::kLinkInfiniBand : ibv::kLinkEthernet;
  return 0;
}

int _ibv_query_gid_ex(ibv::Context* raw, uint32_t number, uint32_t index, ibv::GidEntry* entry,
                      uint32_t, size_t size) {
  World& all = world();
  const std::lock_guard lock(all.mutex);
  if (const int error = all.injected("query_gid")) return error;
  const fake_verbs::Port& port = static_cast<Context*>(raw)->facts->ports.at(number - 1u);
  if (index >= port.gids.size() || size != sizeof(*entry)) return ENODATA;
  *entry = {};
  entry->gid_index = index;
  entry->port_num = number;
  entry->gid_type = port.infiniband ? ibv::kGidInfiniBand : port.gids[index].type;
  return ::inet_pton(AF_INET6, port.gids[index].text.c_str(), entry->gid.raw) == 1 ? 0 : EINVAL;
}

int ibv_get_async_event(ibv::Context* raw, ibv::AsyncEvent* event) {
  uint64_t one;
  if (::read(raw->async_fd, &one, sizeof(one)) != sizeof(one)) return -1;
  World& all = world();
  const std::lock_guard lock(all.mutex);
  auto& events = static_cast<Context*>(raw)->events;
  if (events.empty()) {  // what it was about is gone
    errno = EAGAIN;
    return -1;
  }
  *event = events.front();
  events.pop_front();
  if (int* out = events_out(*event)) ++*out;
  return 0;
}

void ibv_ack_async_event(ibv::AsyncEvent* event) {
  World& all = world();
  const std::lock_guard lock(all.mutex);
  if (int* out = events_out(*event)) --*out;
  all.changed.notify_all();
}

ibv::Pd* ibv_alloc_pd(ibv::Context* context) {
  World& all = world();
  const std::lock_guard lock(all.mutex);
  if (const int error = all.injected("alloc_pd")) return fail<ibv::Pd>(error);
  auto* pd = new ibv::Pd{context, 0};
  all.pds.insert(pd);
  return pd;
}

int ibv_dealloc_pd(ibv::Pd* pd) {
  World& all = world();
  const std::lock_guard lock(all.mutex);
  for (const Mr* mr : all.mrs) {
    if (mr->pd == pd) all.violation("a protection domain freed with memory left");
  }
  for (const auto& [number, qp] : all.qps) {
    if (qp->pd == pd) all.violation("a protection domain freed with a queue pair left");
  }
  all.pds.erase(pd);
  delete pd;
  return 0;
}

// Whether the host can read there. A GPU's memory it can't.
static bool is_readable(const void* address) {
  static const int sink = ::memfd_create("fake-verbs", MFD_CLOEXEC);
  return ::pwrite(sink, address, 1, 0) == 1;
}

// Has the adapter reach what is behind a descriptor. Returns 0, or an errno value.
static int map_memory(const World& all, Mr& mr, int fd, size_t offset) {
  const auto page = static_cast<size_t>(::sysconf(_SC_PAGESIZE));
  const size_t into = offset % page;
  mr.mapped_bytes = into + mr.length;
  const int flags = all.lose_gpu_writes ? MAP_PRIVATE : MAP_SHARED;
  void* mapped = ::mmap(nullptr, mr.mapped_bytes, PROT_READ | PROT_WRITE, flags, fd,
                        static_cast<off_t>(offset - into));
  if (mapped == MAP_FAILED) return errno;
  mr.mapped = mapped;
  mr.addr = static_cast<char*>(mapped) + into;
  return 0;
}

// A dma-buf begins where its descriptor stands in what is behind it.
static int map_dmabuf(const World& all, Mr& mr, const fake_verbs::Registration& asked) {
  const auto begin = static_cast<size_t>(::lseek(asked.fd, 0, SEEK_CUR));
  return map_memory(all, mr, asked.fd, begin + (asked.offset & all.offset_mask));
}

// The same for an address that may be a GPU's.
static int map_address(const World& all, Mr& mr) {
  if (is_readable(mr.addr)) return 0;
  int fd = -1;
  size_t offset = 0;
  if (all.peer_memory == nullptr ||
      all.peer_memory(reinterpret_cast<uintptr_t>(mr.addr), mr.length, &fd, &offset) != 0) {
    return EFAULT;
  }
  const int error = map_memory(all, mr, fd, offset);
  ::close(fd);
  return error;
}

static ibv::Mr* register_memory(ibv::Pd* pd, void* address, fake_verbs::Registration asked) {
  World& all = world();
  std::unique_lock lock(all.mutex);
  all.changed.wait(lock, [&] { return !all.hold_registrations; });
  if (const int error = all.injected(asked.fd < 0 ? "reg_mr" : "reg_dmabuf_mr")) {
    return fail<ibv::Mr>(error);
  }
  if (asked.length > static_cast<Context*>(pd->context)->facts->max_mr_size) {
    return fail<ibv::Mr>(EINVAL);
  }
  auto* mr = new Mr{};
  mr->context = pd->context;
  mr->pd = pd;
  mr->addr = address;
  mr->length = asked.length;
  const int error = asked.fd >= 0 ? map_dmabuf(all, *mr, asked) : map_address(all, *mr);
  if (error != 0) {
    delete mr;
    return fail<ibv::Mr>(error);
  }
  mr->lkey = all.next_key++;
  mr->rkey = all.next_key++;
  mr->iova = asked.iova;
  mr->access = asked.access;
  all.mrs.insert(mr);
  all.last_registration = asked;
  ++all.counts.registrations;
  return mr;
}

ibv::Mr* ibv_reg_mr_iova2(ibv::Pd* pd, void* address, size_t length, uint64_t iova,
                          unsigned access) {
  return register_memory(pd, address, {-1, 0, length, iova, access});
}

ibv::Mr* ibv_reg_dmabuf_mr(ibv::Pd* pd, uint64_t offset, size_t length, uint64_t iova, int fd,
                           int access) {
  return register_memory(pd, reinterpret_cast<void*>(iova),
                         {fd, offset, length, iova, static_cast<unsigned>(access)});
}

int ibv_dereg_mr(ibv::Mr* raw) {
  World& all = world();
  const std::lock_guard lock(all.mutex);
  auto* mr = static_cast<Mr*>(raw);
  all.mrs.erase(mr);
  all.land([&](const DelayedWrite& write) { return write.mr == mr; });
  if (mr->mapped != nullptr) ::munmap(mr->mapped, mr->mapped_bytes);
  delete mr;
  return 0;
}

}  // extern "C"
