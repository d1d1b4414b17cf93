// FETCH and ACCEPT, and what the direct path and memory of GPUs add to them.

#include <string>

#include "wire/message_io.h"
#include "wire/messages.h"

namespace kvxfer::wire {
namespace {

void put_fetch(ByteWriter& out, const Fetch& m) {
  out.put(m.fetch_id);
  out.put_string(m.offer_id);
  out.put_raw(m.generation);
  out.put(m.cache_id);
  out.put_list(m.layers);
  for (uint32_t field : {m.head_begin, m.head_end, m.token_begin, m.token_end, m.slot_in_block})
    out.put(field);
  out.put(m.codec);
  out.put(m.panel_tokens);
  out.put(m.group);
  out.put(m.scale_format);
  for (uint32_t field : {m.raw_until, m.raw_from, m.unpack_rate, m.decode_rate}) out.put(field);
  out.put(m.with_digest);
  out.put(m.chunk_bytes);
  out.put(m.consumers);
  out.put_list(m.slots);
}

Fetch get_fetch(ByteReader& in) {
  Fetch m;
  m.fetch_id = in.get<uint64_t>();
  m.offer_id = in.get_string(kMaxName);
  m.generation = in.get_array<16>();
  m.cache_id = in.get<uint32_t>();
  m.layers = in.get_list(kMaxLayers);
  for (uint32_t* field :
       {&m.head_begin, &m.head_end, &m.token_begin, &m.token_end, &m.slot_in_block}) {
    *field = in.get<uint32_t>();
  }
  m.codec = in.get<uint8_t>();
  m.panel_tokens = in.get<uint16_t>();
  m.group = in.get<uint16_t>();
  m.scale_format = in.get<uint8_t>();
  for (uint32_t* field : {&m.raw_until, &m.raw_from, &m.unpack_rate, &m.decode_rate}) {
    *field = in.get<uint32_t>();
  }
  m.with_digest = in.get<uint8_t>();
  m.chunk_bytes = in.get<uint32_t>();
  m.consumers = in.get<uint32_t>();
  m.slots = in.get_list(kMaxSlots);
  return m;
}

void put_accept(ByteWriter& out, const Accept& m) {
  out.put(m.fetch_id);
  for (uint8_t axis : m.order) out.put(axis);
  out.put(m.per_layer);
  out.put(m.num_chunks);
  out.put(m.wire_bytes);
  out.put(m.producer_block_size);
  out.put(m.producer_slot);
  out.put(m.codec);
  out.put(m.element);
  out.put(m.panel_tokens);
  out.put(static_cast<uint32_t>(m.encodings.size()));
  for (const PlaneEncoding& encoding : m.encodings) {
    out.put(encoding.scheme);
    out.put(encoding.scale_format);
    out.put(encoding.group);
  }
  out.put(m.raw_until);
  out.put(m.raw_from);
  put_floats(out, m.scales);
  out.put_string(m.why.substr(0, kMaxText));
}

Accept get_accept(ByteReader& in) {
  Accept m;
  m.fetch_id = in.get<uint64_t>();
  unsigned seen = 0;
  for (uint8_t& axis : m.order) {
    axis = in.get<uint8_t>();
    if (axis >= m.order.size() || (seen & 1u << axis)) {
      throw Error(StatusCode::kProtocol,
                  "ACCEPT names a wire order that is no permutation of the five axes");
    }
    seen |= 1u << axis;
  }
  m.per_layer = in.get<uint8_t>();
  m.num_chunks = in.get<uint32_t>();
  m.wire_bytes = in.get<uint64_t>();
  m.producer_block_size = in.get<uint32_t>();
  m.producer_slot = in.get<uint32_t>();
  if (m.producer_slot >= m.producer_block_size) {
    throw Error(StatusCode::kProtocol, "ACCEPT names slot " + std::to_string(m.producer_slot) +
                                           " of a block of " +
                                           std::to_string(m.producer_block_size));
  }
  m.codec = in.get<uint8_t>();
  m.element = in.get<uint8_t>();
  m.panel_tokens = in.get<uint16_t>();
  const auto num_encodings = in.get<uint32_t>();
  in.check_count(num_encodings, kMaxPlanes, "a list of encodings", sizeof(uint32_t));
  for (uint32_t i = 0; i < num_encodings; ++i) {
    PlaneEncoding encoding;
    encoding.scheme = in.get<uint8_t>();
    encoding.scale_format = in.get<uint8_t>();
    encoding.group = in.get<uint16_t>();
    m.encodings.push_back(encoding);
  }
  m.raw_until = in.get<uint32_t>();
  m.raw_from = in.get<uint32_t>();
  m.scales = get_floats(in);
  m.why = in.get_string(kMaxText);
  return m;
}

}  // namespace

Bytes Fetch::encode() const {
  ByteWriter out = begin(MessageType::kFetch);
  put_fetch(out, *this);
  return out.take();
}

Fetch Fetch::decode(std::span<const std::byte> body) {
  ByteReader in(body);
  Fetch m = get_fetch(in);
  in.expect_end();
  return m;
}

Bytes Accept::encode() const {
  ByteWriter out = begin(MessageType::kAccept);
  put_accept(out, *this);
  return out.take();
}

Accept Accept::decode(std::span<const std::byte> body) {
  ByteReader in(body);
  Accept m = get_accept(in);
  in.expect_end();
  return m;
}

Bytes Memory::encode() const {
  ByteWriter out = begin(MessageType::kMemory);
  out.put(cache_id);
  out.put(static_cast<uint32_t>(keys.size()));
  out.put_raw(keys);
  return out.take();
}

Memory Memory::decode(std::span<const std::byte> body) {
  ByteReader in(body);
  Memory m;
  m.cache_id = in.get<uint32_t>();
  const std::string keys = in.get_string(kMaxKeys);
  const auto bytes = std::as_bytes(std::span(keys));
  m.keys.assign(bytes.begin(), bytes.end());
  in.expect_end();
  return m;
}

Bytes FetchDirect::encode() const {
  ByteWriter out = begin(MessageType::kFetchDirect);
  put_fetch(out, fetch);
  out.put(path);
  out.put_list(blocks);
  return out.take();
}

FetchDirect FetchDirect::decode(std::span<const std::byte> body) {
  ByteReader in(body);
  FetchDirect m;
  m.fetch = get_fetch(in);
  m.path = in.get<uint8_t>();
  if (m.path != kAuto && m.path != kDirect) {
    throw Error(StatusCode::kProtocol, "FETCH_DIRECT names the path " + std::to_string(m.path));
  }
  m.blocks = in.get_list(kMaxBlocks);
  in.expect_end();
  return m;
}

Bytes AcceptDirect::encode() const {
  ByteWriter out = begin(MessageType::kAcceptDirect);
  put_accept(out, accept);
  out.put(direct);
  out.put_string(path_why.substr(0, kMaxText));
  return out.take();
}

AcceptDirect AcceptDirect::decode(std::span<const std::byte> body) {
  ByteReader in(body);
  AcceptDirect m;
  m.accept = get_accept(in);
  m.direct = in.get<uint8_t>();
  if (m.direct > 1) throw Error(StatusCode::kProtocol, "ACCEPT_DIRECT is neither yes nor no");
  m.path_why = in.get_string(kMaxText);
  in.expect_end();
  return m;
}

Bytes GpuArena::encode() const {
  ByteWriter out = begin(MessageType::kGpuArena);
  out.put(arena);
  out.put(vendor);
  out.put_raw(uuid);
  out.put_string(pci);
  out.put(bytes);
  out.put(mailbox);
  out.put_raw(stamp);
  out.put_raw(handle);
  return out.take();
}

GpuArena GpuArena::decode(std::span<const std::byte> body) {
  ByteReader in(body);
  GpuArena m;
  m.arena = in.get<uint32_t>();
  m.vendor = in.get<uint8_t>();
  if (m.vendor > 1) {
    throw Error(StatusCode::kProtocol, "GPU_ARENA names the vendor " + std::to_string(m.vendor));
  }
  m.uuid = in.get_array<16>();
  m.pci = in.get_string(kMaxPci);
  m.bytes = in.get<uint64_t>();
  m.mailbox = in.get<uint64_t>();
  m.stamp = in.get_array<32>();
  m.handle = in.get_array<64>();
  in.expect_end();
  return m;
}

Bytes FetchGpu::encode() const {
  ByteWriter out = begin(MessageType::kFetchGpu);
  put_fetch(out, fetch);
  out.put(arena);
  return out.take();
}

FetchGpu FetchGpu::decode(std::span<const std::byte> body) {
  ByteReader in(body);
  FetchGpu m;
  m.fetch = get_fetch(in);
  m.arena = in.get<uint32_t>();
  in.expect_end();
  return m;
}

Bytes AcceptGpu::encode() const {
  ByteWriter out = begin(MessageType::kAcceptGpu);
  put_accept(out, accept);
  out.put(gpu);
  out.put_string(path_why.substr(0, kMaxText));
  return out.take();
}

AcceptGpu AcceptGpu::decode(std::span<const std::byte> body) {
  ByteReader in(body);
  AcceptGpu m;
  m.accept = get_accept(in);
  m.gpu = in.get<uint8_t>();
  if (m.gpu > 1) throw Error(StatusCode::kProtocol, "ACCEPT_GPU is neither yes nor no");
  m.path_why = in.get_string(kMaxText);
  in.expect_end();
  return m;
}

Bytes encode_gpu_closed() { return begin(MessageType::kGpuClosed).take(); }

void decode_gpu_closed(std::span<const std::byte> body) { ByteReader(body).expect_end(); }

Bytes GpuTrial::encode() const {
  ByteWriter out = begin(MessageType::kGpuTrial);
  out.put(arena);
  out.put(trial);
  return out.take();
}

GpuTrial GpuTrial::decode(std::span<const std::byte> body) {
  ByteReader in(body);
  GpuTrial m;
  m.arena = in.get<uint32_t>();
  m.trial = in.get<uint32_t>();
  in.expect_end();
  return m;
}

Bytes GpuTried::encode() const {
  ByteWriter out = begin(MessageType::kGpuTried);
  out.put(arena);
  out.put(trial);
  out.put_string(problem.substr(0, kMaxText));
  return out.take();
}

GpuTried GpuTried::decode(std::span<const std::byte> body) {
  ByteReader in(body);
  GpuTried m;
  m.arena = in.get<uint32_t>();
  m.trial = in.get<uint32_t>();
  m.problem = in.get_string(kMaxText);
  in.expect_end();
  return m;
}

Bytes encode_gpu_caches() { return begin(MessageType::kGpuCaches).take(); }

void decode_gpu_caches(std::span<const std::byte> body) { ByteReader(body).expect_end(); }

}  // namespace kvxfer::wire
