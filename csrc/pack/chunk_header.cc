#include "pack/chunk_header.h"

#include <array>
#include <bit>
#include <cstring>
#include <string>

#include "base/byte_io.h"
#include "kvxfer/status.h"

namespace kvxfer {
namespace {

static_assert(std::endian::native == std::endian::little, "counts are stored as they are");

constexpr uint32_t kMagic = 0x4358564b;
constexpr uint8_t kVersion = 1;
constexpr size_t kNumPlanesAt = 7;
constexpr size_t kCountsAt = 12;  // first panel, panels, exceptions: 4 bytes each
constexpr size_t kExceptionsAt = 20;
constexpr size_t kPlanesAt = 24;
constexpr size_t kPlaneBytes = 8;

struct Field {
  const char* name;
  size_t at;
  size_t bytes;
};

constexpr Field kFields[] = {
    {"magic", 0, 4},
    {"version", 4, 1},
    {"codec", 5, 1},
    {"element", 6, 1},
    {"planes", kNumPlanesAt, 1},
    {"panel tokens", 8, 2},
    {"reserved", 10, 2},
    {"first panel", kCountsAt, 4},
    {"panels", 16, 4},
    {"exceptions", kExceptionsAt, 4},
};

constexpr Field kPlaneFields[] = {
    {"scheme", 0, 1},
    {"scale format", 1, 1},
    {"group", 2, 2},
    {"content", 4, 4},
};

uint32_t get(const std::byte* header, const Field& field) {
  uint32_t value = 0;
  std::memcpy(&value, header + field.at, field.bytes);
  return value;
}

[[noreturn]] void refuse(const std::string& field, const std::string& found,
                         const std::string& expected) {
  throw Error(StatusCode::kProtocol, "the header of a coded chunk has " + field + " " + found +
                                         ", expected " + expected +
                                         "; the two sides disagree about the format");
}

void compare(const std::byte* found, const std::byte* expected, const Field& field,
             const std::string& where) {
  const uint32_t is = get(found, field), should = get(expected, field);
  if (is != should) refuse(field.name + where, std::to_string(is), std::to_string(should));
}

}  // namespace

std::vector<std::byte> make_header(const PanelFormat& format, std::span<const uint32_t> contents) {
  ByteWriter writer;
  writer.put(kMagic);
  writer.put(kVersion);
  writer.put(format.codec);
  writer.put(static_cast<uint8_t>(format.producer_element));
  writer.put(static_cast<uint8_t>(contents.size()));
  writer.put(static_cast<uint16_t>(format.panel_tokens));
  writer.put(uint16_t{0});
  for (int i = 0; i < 3; ++i) writer.put(uint32_t{0});
  for (size_t plane = 0; plane < contents.size(); ++plane) {
    const Encoding& encoding = format.encodings[plane];
    writer.put(static_cast<uint8_t>(encoding.scheme));
    writer.put(static_cast<uint8_t>(encoding.scale));
    writer.put(encoding.group);
    writer.put(contents[plane]);
  }
  std::vector<std::byte> header = writer.take();
  header.resize(header_bytes(contents.size()));
  return header;
}

void put_header(std::span<const std::byte> header, const ChunkCounts& counts, std::byte* wire) {
  static_assert(sizeof(ChunkCounts) == kPlanesAt - kCountsAt);
  std::memcpy(wire, header.data(), header.size());
  std::memcpy(wire + kCountsAt, &counts, sizeof(counts));
}

uint32_t check_header(std::span<const std::byte> expected, ChunkCounts counts,
                      const std::byte* wire) {
  std::array<std::byte, header_bytes(kMaxChunkPlanes)> found, wanted;
  std::memcpy(found.data(), wire, expected.size());
  std::memcpy(&counts.exceptions, found.data() + kExceptionsAt, sizeof(counts.exceptions));
  put_header(expected, counts, wanted.data());
  if (std::memcmp(found.data(), wanted.data(), expected.size()) == 0) return counts.exceptions;

  for (const Field& field : kFields) compare(found.data(), wanted.data(), field, "");
  const size_t planes = static_cast<size_t>(expected[kNumPlanesAt]);
  for (size_t plane = 0; plane < planes; ++plane) {
    const size_t at = kPlanesAt + plane * kPlaneBytes;
    for (const Field& field : kPlaneFields) {
      compare(found.data() + at, wanted.data() + at, field, " of plane " + std::to_string(plane));
    }
  }
  refuse("bytes behind its last plane", "that are not all 0", "zeros");
}

}  // namespace kvxfer
