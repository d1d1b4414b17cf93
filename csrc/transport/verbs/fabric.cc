#include "transport/verbs/fabric.h"

#include <sys/epoll.h>

#include <algorithm>
#include <random>
#include <utility>

#include "kvxfer/status.h"

namespace kvxfer {
namespace {

// Any of 2^41 places. Addresses keep what they have within the largest pages but one, so that
// adapters find large pages as ever.
uint64_t draw_shift() {
  std::random_device source;
  const uint64_t drawn = uint64_t{source()} << 32 | source();
  return drawn % (uint64_t{1} << 41) << 21;
}

std::vector<VerbsRail> describe(const std::vector<ibv::Rail>& rails) {
  std::vector<VerbsRail> described;
  for (const ibv::Rail& rail : rails) {
    VerbsRail facts;
    facts.device = rail.nic->name;
    facts.port = rail.port;
    facts.active = rail.active();
    facts.link_layer = rail.attr.link_layer == ibv::kLinkInfiniBand ? "InfiniBand" : "Ethernet";
    for (const ibv::PortGid& gid : rail.gids) {
      facts.gids.push_back(std::to_string(gid.index) + ": " + ibv::gid_text(gid));
    }
    facts.lid = rail.attr.lid;
    facts.mtu = ibv::mtu_bytes(rail.attr.active_mtu);
    facts.mbit_per_second = rail.mbit_per_second();
    facts.pci_address = rail.nic->place.address();
    facts.numa_node = rail.nic->place.numa_node;
    described.push_back(std::move(facts));
  }
  return described;
}

}  // namespace

VerbsFabric::State::State(std::shared_ptr<EventLoop> control_loop, const VerbsOptions& given)
    : control(std::move(control_loop)), options(given) {
  if (options.queue_pairs == 0 || options.queue_pairs > 32 || options.send_depth == 0 ||
      options.receives == 0 || options.stripe_bytes == 0) {
    throw Error(StatusCode::kInvalid,
                "verbs: queue_pairs must be 1 to 32, send_depth, receives and stripe_bytes at "
                "least 1");
  }
  if (options.timeout > 31 || options.retry_count > 7 || options.rnr_retry > 7 ||
      options.min_rnr_timer > 31) {
    throw Error(StatusCode::kInvalid,
                "verbs: timeout and min_rnr_timer must be 0 to 31, retry_count and rnr_retry 0 to "
                "7");
  }
  ibv::Rails opened = ibv::open_rails(options);
  nics = std::move(opened.nics);
  rails = std::move(opened.rails);
  nearness = std::move(opened.nearness);
  loopbacks = std::make_shared<ibv::Loopbacks>(rails, nics.size(), options);
}

VerbsFabric::State::~State() {
  for (const auto& nic : nics) control->remove(nic->context->async_fd);
}

void VerbsFabric::State::watch() {
  for (size_t i = 0; i < nics.size(); ++i) {
    control->add(nics[i]->context->async_fd, EPOLLIN, [weak = weak_from_this(), i](uint32_t) {
      if (const auto self = weak.lock()) self->on_async_event(i);
    });
  }
}

void VerbsFabric::State::on_async_event(size_t nic_index) {
  const ibv::Nic& nic = *nics[nic_index];
  std::vector<std::shared_ptr<ibv::Listener>> listeners;
  {
    const std::lock_guard lock(mutex_);
    std::erase_if(listeners_, [](const auto& listener) { return listener.expired(); });
    for (const auto& weak : listeners_) {
      if (auto listener = weak.lock()) listeners.push_back(std::move(listener));
    }
  }
  ibv::AsyncEvent event{};
  while (nic.library->get_async_event(nic.context.get(), &event) == 0) {
    const ibv::EventType type = event.event_type;
    const bool about_qp =
        type == ibv::kQpFatal || type == ibv::kQpRequestError || type == ibv::kQpAccessError;
    const uint32_t number = about_qp ? event.element.qp->qp_num : 0;
    const ibv::Cq* cq = type == ibv::kCqError ? event.element.cq : nullptr;
    const auto port = static_cast<uint8_t>(type == ibv::kPortError ? event.element.port_num : 0);
    nic.library->ack_async_event(&event);  // first: what it is about can't be destroyed before
    for (const auto& listener : listeners) {
      if (about_qp) listener->on_queue_pair_error(nic_index, number);
      if (port != 0) listener->on_port_down(nic_index, port);
      if (cq) listener->on_completion_queue_error(nic_index, cq);
      if (type == ibv::kDeviceFatal) listener->on_adapter_error(nic_index);
    }
  }
}

std::shared_ptr<VerbsMemory> VerbsFabric::State::register_memory(std::span<std::byte> memory,
                                                                 VerbsAccess access,
                                                                 std::shared_ptr<void> owner) {
  if (memory.empty()) throw Error(StatusCode::kInvalid, "verbs: there is no memory to register");
  auto registered = std::make_shared<VerbsMemory>(nics, DirectSpan{memory}, access,
                                                  options.relaxed_ordering, std::move(owner));
  const std::lock_guard lock(mutex_);
  std::erase_if(memories_, [](const auto& entry) { return entry.second.expired(); });
  memories_[memory.data()] = registered;
  return registered;
}

// None of these is found again by its address: memory that is freed and mapped anew is another.
std::shared_ptr<ibv::LocalMemory> VerbsFabric::State::register_direct(
    std::span<const DirectSpan> memory, Link::DirectUse use) const {
  const auto access = use == Link::DirectUse::kTarget ? VerbsAccess::kArena : VerbsAccess::kSource;
  // Keys of one peer work on the queue pairs of all: addresses must not be easy to guess.
  const uint64_t shift = use == Link::DirectUse::kTarget ? draw_shift() : 0;
  std::vector<std::shared_ptr<VerbsMemory>> parts;
  for (const DirectSpan& part : memory) {
    parts.push_back(std::make_shared<VerbsMemory>(nics, part, access, options.relaxed_ordering,
                                                  nullptr, shift));
  }
  return std::make_shared<ibv::LocalMemory>(std::move(parts), rails, loopbacks);
}

std::shared_ptr<VerbsMemory> VerbsFabric::State::memory_of(std::span<const std::byte> source) {
  {
    const std::lock_guard lock(mutex_);
    auto after = memories_.upper_bound(source.data());
    if (after != memories_.begin()) {
      auto known = std::prev(after)->second.lock();
      if (known && known->holds(source)) return known;
    }
  }
  const std::span<std::byte> bytes(const_cast<std::byte*>(source.data()), source.size());
  return std::make_shared<VerbsMemory>(nics, DirectSpan{bytes}, VerbsAccess::kSource,
                                       options.relaxed_ordering, nullptr);
}

void VerbsFabric::State::add(const std::shared_ptr<ibv::Listener>& listener) {
  const std::lock_guard lock(mutex_);
  std::erase_if(listeners_, [](const auto& known) { return known.expired(); });
  listeners_.push_back(listener);
}

VerbsFabric::VerbsFabric(IoThreads& threads, const VerbsOptions& options)
    : state_(std::make_shared<State>(threads.control(), options)) {
  state_->watch();
}

VerbsFabric::~VerbsFabric() = default;

std::vector<VerbsRail> VerbsFabric::rails() const { return describe(state_->rails); }

std::vector<VerbsRail> list_verbs_rails(const VerbsOptions& options) {
  return describe(ibv::open_rails(options).rails);
}

std::shared_ptr<VerbsMemory> VerbsFabric::register_memory(std::span<std::byte> memory,
                                                          VerbsAccess access,
                                                          std::shared_ptr<void> owner) {
  return state_->register_memory(memory, access, std::move(owner));
}

VerbsEndpoint::VerbsEndpoint(const VerbsFabric& fabric, std::shared_ptr<VerbsMemory> arena,
                             std::shared_ptr<VerbsMemory> source)
    : state_(std::make_unique<State>()) {
  state_->fabric = fabric.state_;
  state_->arena = std::move(arena);
  state_->source = std::move(source);
  ibv::EndpointAddress& address = state_->address;
  if (state_->arena) {
    address.arena_base = reinterpret_cast<uint64_t>(state_->arena->memory().data());
    address.arena_bytes = state_->arena->memory().size();
    address.piece_bytes = state_->arena->piece_bytes();
  }
  for (const ibv::Rail& rail : fabric.state_->rails) {
    ibv::RailAddress& said = address.rails.emplace_back();
    said.name = rail.name();
    said.ethernet = rail.attr.link_layer != ibv::kLinkInfiniBand;
    said.lid = rail.attr.lid;
    said.mtu = static_cast<uint8_t>(rail.attr.active_mtu);
    said.mbit_per_second = rail.mbit_per_second();
    said.gids = rail.gids;
    if (state_->arena) said.rkeys = state_->arena->rkeys(rail.nic_index);
    auto& qps = state_->qps.emplace_back();
    for (uint32_t i = 0; i < fabric.state_->options.queue_pairs; ++i) {
      qps.push_back(std::make_unique<ibv::QueuePair>(rail, fabric.state_->options));
      said.qps.push_back(qps.back()->address());
    }
  }
  state_->encoded = address.encode();
}

VerbsEndpoint::~VerbsEndpoint() = default;
VerbsEndpoint::VerbsEndpoint(VerbsEndpoint&&) noexcept = default;
VerbsEndpoint& VerbsEndpoint::operator=(VerbsEndpoint&&) noexcept = default;

const std::vector<std::byte>& VerbsEndpoint::address() const { return state_->encoded; }

}  // namespace kvxfer
