#include "transport/ucx/worker.h"

#include <sys/epoll.h>

#include <algorithm>
#include <iterator>
#include <sstream>

#include "base/byte_io.h"
#include "base/unique_fd.h"
#include "kvxfer/status.h"

namespace kvxfer::ucp {
namespace {

constexpr uint32_t kVersion = 1;  // of addresses
constexpr uint32_t kMaxPart = 64u << 10;
constexpr size_t kMaxParse = 64u << 10;          // bytes that UCX reads beyond the end, at most
constexpr size_t kHeadBytes = sizeof(Key) + 24;  // of a message, before its notice
constexpr unsigned kMessageId = 1;
// What is kept of a peer that sends before anybody listens.
constexpr size_t kMaxEarlyMessages = 256;
constexpr size_t kMaxEarlyBytes = 64u << 20;
// Other links of the same loop get their turn after so many rounds.
constexpr int kRoundsPerTurn = 64;

RequestParam param_of(SendCallback callback, void* user_data) {
  RequestParam param;
  param.op_attr_mask = RequestParam::kCallback | RequestParam::kUserData;
  param.callback = callback;
  param.user_data = user_data;
  return param;
}

// Takes as long whatever the difference.
bool begins_with(std::span<const std::byte> message, const Key& key) {
  if (message.size() < kHeadBytes) return false;
  std::byte difference{0};
  for (size_t i = 0; i < key.size(); ++i) difference |= message[i] ^ key[i];
  return difference == std::byte{0};
}

}  // namespace

std::vector<std::byte> ReaderAddress::encode() const {
  ByteWriter writer;
  writer.put(kVersion);
  writer.put_raw(key);
  writer.put(arena_base);
  writer.put(arena_bytes);
  writer.put_string(rkey);
  writer.put_string(worker);
  return writer.take();
}

ReaderAddress ReaderAddress::decode(std::span<const std::byte> bytes) {
  ByteReader reader(bytes);
  if (const auto version = reader.get<uint32_t>(); version != kVersion) {
    throw Error(StatusCode::kProtocol, "the peer's UCX address is of version " +
                                           std::to_string(version) + ", ours of " +
                                           std::to_string(kVersion));
  }
  ReaderAddress address;
  address.key = reader.get_array<std::tuple_size_v<Key>>();
  address.arena_base = reader.get<uint64_t>();
  address.arena_bytes = reader.get<uint64_t>();
  address.rkey = reader.get_string(kMaxPart);
  address.worker = reader.get_string(kMaxPart);
  reader.expect_end();
  if (address.arena_bytes == 0 || address.arena_base + address.arena_bytes < address.arena_base ||
      address.worker.empty()) {
    throw Error(StatusCode::kProtocol, "the peer's UCX address makes no sense");
  }
  if (!address.rkey.empty()) address.rkey.append(kMaxParse, '\0');
  address.worker.append(kMaxParse, '\0');
  return address;
}

std::vector<std::byte> Message::encode_head(const Key& key, uint64_t offset, uint64_t size,
                                            bool put, std::span<const std::byte> notice) {
  ByteWriter writer;
  writer.put_raw(key);
  writer.put(offset);
  writer.put(size);
  writer.put(uint32_t{put});
  writer.put(static_cast<uint32_t>(notice.size()));
  writer.put_raw(notice);
  return writer.take();
}

Message Message::decode(std::span<const std::byte> message) {
  ByteReader reader(message);
  reader.get_array<std::tuple_size_v<Key>>();  // checked when it came
  Message decoded;
  decoded.offset = reader.get<uint64_t>();
  const auto size = reader.get<uint64_t>();
  const auto put = reader.get<uint32_t>();
  const auto notice_size = reader.get<uint32_t>();
  const auto rest = message.subspan(kHeadBytes);
  if (put > 1 || notice_size > kMaxNotice || size > kMaxWrite ||
      rest.size() != notice_size + (put ? 0 : size)) {
    throw Error(StatusCode::kProtocol, "the peer sent a write that makes no sense");
  }
  decoded.put = put == 1;
  decoded.notice = rest.first(notice_size);
  decoded.bytes = rest.subspan(notice_size);
  return decoded;
}

Driver::Driver(std::shared_ptr<UcxFabric::State> fabric, std::shared_ptr<EventLoop> loop)
    : fabric_(std::move(fabric)),
      library_(*fabric_->library),
      loop_(std::move(loop)),
      generation_(fork_generation()) {
  WorkerParams params;
  params.field_mask = WorkerParams::kThreadMode;
  params.thread_mode = kThreadSerialized;
  check(library_, library_.worker_create(fabric_->context, &params, &worker_), "making a worker");
  AmHandlerParam handler;
  handler.field_mask = AmHandlerParam::kId | AmHandlerParam::kFlags | AmHandlerParam::kCallback |
                       AmHandlerParam::kArg;
  handler.id = kMessageId;
  handler.flags = AmHandlerParam::kWholeMessage | AmHandlerParam::kPersistentData;
  handler.cb = on_message;
  handler.arg = this;
  try {
    check(library_, library_.worker_set_am_recv_handler(worker_, &handler), "a message handler");
    check(library_, library_.worker_get_efd(worker_, &event_fd_), "its event descriptor");
  } catch (const Error&) {
    library_.worker_destroy(worker_);
    throw;
  }
}

Driver::~Driver() { destroy(); }

std::string Driver::address() const {
  WorkerAttr attr;
  attr.field_mask = WorkerAttr::kAddress;
  check(library_, library_.worker_query(worker_, &attr), "the address of a worker");
  std::string address(reinterpret_cast<const char*>(attr.address), attr.address_length);
  library_.worker_release_address(worker_, attr.address);
  return address;
}

void Driver::start(const std::optional<Key>& key) {
  key_ = key;
  loop_->add(event_fd_, EPOLLIN, [weak = weak_from_this()](uint32_t) {
    if (const auto self = weak.lock()) self->drive();
  });
  loop_->post([weak = weak_from_this()] {
    if (const auto self = weak.lock()) self->drive();
  });
}

void Driver::drive() {
  bool armed = false;
  for (int round = 0; worker_ && round < kRoundsPerTurn; ++round) {
    const bool progressed = library_.worker_progress(worker_) != 0;
    settle();
    if (const auto call = on_progress_) (*call)();  // which may set another
    if (!worker_) return;
    if (progressed || !settled_.empty()) {
      armed = false;
      continue;
    }
    if (armed) return;
    const Status status = library_.worker_arm(worker_);
    // Not all adapters tell of what came before they were armed, so look once more.
    armed = status == kOk;
    if (armed || status == kBusy) continue;
    note(std::string("it cannot sleep: ") + library_.status_string(status));
    if (const auto call = on_progress_) (*call)();
    return;
  }
  if (!worker_) return;
  loop_->post([weak = weak_from_this()] {
    if (const auto self = weak.lock()) self->drive();
  });
}

void Driver::connect(const ReaderAddress& reader) {
  EndpointParams params;
  params.field_mask =
      EndpointParams::kRemoteAddress | EndpointParams::kErrMode | EndpointParams::kErrHandler;
  params.address = reinterpret_cast<const Address*>(reader.worker.data());
  params.err_mode = kErrPeer;
  params.err_handler = {on_error, this};
  Status status = library_.ep_create(worker_, &params, &endpoint_);
  if (status == kOk && fabric_->puts && !reader.rkey.empty()) {
    status = library_.ep_rkey_unpack(endpoint_, reader.rkey.data(), &rkey_);
  }
  if (status != kOk) return note(library_.status_string(status));
  arena_base_ = reader.arena_base;
  // Lanes are final when the peer has answered.
  const RequestParam param = param_of(on_connected, this);
  const StatusPtr flush = library_.ep_flush_nbx(endpoint_, &param);
  if (is_error(flush)) return note(library_.status_string(status_of(flush)));
  connected_ = flush == nullptr;
}

void Driver::on_connected(void* request, Status status, void* self) {
  auto& driver = *static_cast<Driver*>(self);
  driver.library_.request_free(request);
  if (status == kOk) {
    driver.connected_ = true;
  } else {
    driver.note(driver.library_.status_string(status));
  }
}

// A put may complete before its bytes are there; the flush behind it does not.
void Driver::begin(const std::shared_ptr<Write>& owned, bool put) {
  Write& write = *owned;
  if (!endpoint_) return report(write, false);
  writes_.emplace(&write, owned);
  write.driver = this;
  write.pending = 1;
  if (!put) {
    announce(write);
  } else {
    RequestParam param = param_of(on_complete, &write);
    param.op_attr_mask |= RequestParam::kMemoryType;
    param.memory_type = kHostMemory;
    if (write.memory) {
      param.op_attr_mask |= RequestParam::kMemh;
      param.memh = write.memory->handle();
    }
    track(write, library_.put_nbx(endpoint_, write.source.data(), write.source.size(),
                                  arena_base_ + write.offset, rkey_, &param));
    if (write.status == kOk) {
      const RequestParam flush = param_of(on_complete, &write);
      track(write, library_.ep_flush_nbx(endpoint_, &flush));
    }
  }
  release(write);
}

void Driver::announce(Write& write) {
  write.announced = true;
  RequestParam param = param_of(on_complete, &write);
  param.op_attr_mask |= RequestParam::kFlags | RequestParam::kDatatype | RequestParam::kMemoryType;
  param.flags = kSendEager;  // else the reader would answer, and UCX abort it if we were gone
  param.datatype = kIovDatatype;
  param.memory_type = kHostMemory;
  write.parts[0] = {write.head.data(), write.head.size()};
  const bool with_bytes = !write.reported && !write.source.empty();
  if (with_bytes) write.parts[1] = {write.source.data(), write.source.size()};
  track(write, library_.am_send_nbx(endpoint_, kMessageId, nullptr, 0, write.parts.data(),
                                    with_bytes ? 2 : 1, &param));
}

void Driver::track(Write& write, StatusPtr posted) {
  if (is_error(posted)) {
    write.status = status_of(posted);
  } else if (posted) {
    ++write.pending;
  }
}

void Driver::release(Write& write) {
  if (--write.pending == 0) settled_.push_back(&write);
}

void Driver::on_complete(void* request, Status status, void* user_data) {
  auto& write = *static_cast<Write*>(user_data);
  Driver& driver = *write.driver;
  driver.library_.request_free(request);
  if (status != kOk && write.status == kOk) write.status = status;
  driver.release(write);
}

void Driver::settle() {
  while (!settled_.empty()) {
    Write& write = *settled_.back();
    settled_.pop_back();
    const bool ok = write.status == kOk && endpoint_;
    if (write.status != kOk)
      note(std::string("a write failed: ") + library_.status_string(write.status));
    if (!write.reported) report(write, ok);
    if (write.announced || !ok) {
      writes_.erase(&write);
      continue;
    }
    write.pending = 1;
    announce(write);
    release(write);
  }
}

void Driver::report(Write& write, bool ok) {
  write.reported = true;
  write.memory.reset();  // the source may be unmapped from now on
  written_.emplace_back(write.token, ok);
}

Status Driver::on_message(void* self, const void*, size_t, void* data, size_t size,
                          const AmRecvParam* param) {
  auto& driver = *static_cast<Driver*>(self);
  // Whoever reaches the port can send something. Only the peer knows the key.
  if (!(param->recv_attr & AmRecvParam::kData) || !driver.key_ ||
      !begins_with({static_cast<const std::byte*>(data), size}, *driver.key_)) {
    return kOk;
  }
  if (!driver.on_progress_) driver.early_bytes_ += size;
  if (size > kHeadBytes + kMaxNotice + kMaxWrite) {
    driver.note("the peer sent something that is no write");
  } else if (!driver.on_progress_ && (driver.messages_.size() == kMaxEarlyMessages ||
                                      driver.early_bytes_ > kMaxEarlyBytes)) {
    driver.note("the peer sends before it was asked to");
  } else {
    driver.messages_.emplace_back(data, size);
    return kInProgress;  // kept until it is released
  }
  return kOk;
}

void Driver::take_messages(const std::function<bool(std::span<const std::byte>)>& deliver) {
  bool go_on = true;
  while (go_on && !messages_.empty()) {
    const auto [data, size] = messages_.front();
    messages_.pop_front();
    go_on = deliver({static_cast<const std::byte*>(data), size});
    library_.am_data_release(worker_, data);
  }
}

void Driver::on_error(void* self, Endpoint*, Status status) {
  auto& driver = *static_cast<Driver*>(self);
  driver.note(std::string("the peer is lost: ") + driver.library_.status_string(status));
}

void Driver::note(const std::string& problem) {
  if (problem_.empty()) problem_ = "UCX: " + problem;
}

void Driver::close_endpoint() {
  if (!endpoint_) return;
  if (rkey_) library_.rkey_destroy(std::exchange(rkey_, nullptr));
  RequestParam param = param_of(on_endpoint_closed, this);
  param.op_attr_mask |= RequestParam::kFlags;
  param.flags = kCloseForce;
  const StatusPtr closing = library_.ep_close_nbx(std::exchange(endpoint_, nullptr), &param);
  closed_ = !closing || is_error(closing);
}

void Driver::on_endpoint_closed(void* request, Status, void* self) {
  auto& driver = *static_cast<Driver*>(self);
  driver.library_.request_free(request);
  driver.closed_ = true;
}

// 1.13 aborts, in builds with assertions as Debian's is, when an endpoint ends whose request to
// connect over RDMA could not be sent yet (openucx/ucx#8175). It has written nothing.
bool Driver::must_stay() const {
  const std::vector<std::string>& resources = fabric_->resources;
  return endpoint_ && !connected_ && library_.version.starts_with("1.13.") &&
         std::any_of(resources.begin(), resources.end(), is_rdma);
}

void Driver::destroy() {
  on_progress_ = nullptr;
  if (!worker_) return;
  // In a forked child it is the parent's.
  if (generation_ == fork_generation()) {
    loop_->remove(event_fd_);
    if (must_stay()) {
      static_cast<void>(new std::shared_ptr<UcxFabric::State>(fabric_));
    } else {
      close_endpoint();
      for (const auto& [data, size] : messages_) library_.am_data_release(worker_, data);
      messages_.clear();
      library_.worker_destroy(worker_);
    }
  }
  worker_ = nullptr;
  settled_.clear();
  for (auto& [key, write] : writes_) {
    if (!write->reported) report(*write, false);
  }
  writes_.clear();
}

Lanes Driver::lanes() const {
  // Lines as "#  lane[0]:  1:tcp/lo.0 md[0]  -> md[0]/tcp/sysdev[255] am am_bw#0 keepalive".
  std::istringstream text(
      printed([this](FILE* stream) { library_.ep_print_info(endpoint_, stream); }));
  Lanes lanes;
  bool emulated = false;
  for (std::string line; std::getline(text, line);) {
    const size_t lane = line.find("lane[");
    if (lane == line.npos) continue;
    std::istringstream words(line.substr(lane));
    std::string name, word;
    words >> word >> name;
    name = name.substr(name.find(':') + 1);
    name = name.substr(0, name.rfind('.'));
    if (std::find(lanes.names.begin(), lanes.names.end(), name) == lanes.names.end()) {
      lanes.names.push_back(name);
    }
    while (words >> word && word != "->") {
    }
    words >> word;  // the peer's end
    std::vector<std::string> uses(std::istream_iterator<std::string>(words), {});
    const bool idle = !uses.empty() && std::all_of(uses.begin(), uses.end(), [](const auto& use) {
      return use == "keepalive" || use == "wireup";
    });
    if (!idle) (can_put(name) ? lanes.put : emulated) = true;
  }
  lanes.put &= !emulated && rkey_;
  return lanes;
}

double Driver::bytes_per_second() const {
  PerfParam param;
  param.field_mask = PerfParam::kMessageSize;
  param.message_size = 1u << 30;
  PerfAttr attr;
  attr.field_mask = PerfAttr::kEstimatedTime;
  if (library_.ep_evaluate_perf(endpoint_, &param, &attr) != kOk || attr.estimated_time <= 0) {
    return 0;
  }
  return static_cast<double>(param.message_size) / attr.estimated_time;
}

}  // namespace kvxfer::ucp
