#include "engine/codec_choice.h"

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <vector>

#include "base/clock.h"
#include "engine/codecs.h"
#include "kvxfer/pack.h"
#include "kvxfer/panel_plan.h"

namespace kvxfer {
namespace {

constexpr double kWorthIt = 0.9;

std::atomic<bool> rates_known{false};

// A cache in bfloat16 with numbers like those of a model, larger than what one core keeps to
// itself.
class Sample {
 public:
  Sample() : memory_(kBytes) {
    uint32_t state = 1;
    for (size_t i = 0; i < kBytes; i += 2) {
      state = state * 1664525u + 1013904223u;
      const uint32_t bits = 0x3f00u | (state >> 16 & 0x80ffu);  // +-0.5 to 2
      memory_[i] = static_cast<std::byte>(bits & 0xff);
      memory_[i + 1] = static_cast<std::byte>(bits >> 8);
    }
    layout_.num_blocks = kTokens / kBlock;
    layout_.block_size = kBlock;
    layout_.num_heads = kHeads;
    layout_.layers = {"sample"};
    layout_.planes = {{"k", kContent}, {"v", kContent}};
    constexpr int64_t kRow = kContent * 2, kPlane = kRow * kHeads * kTokens;
    for (int plane = 0; plane < 2; ++plane) {
      layout_.views.push_back(
          {memory_.data() + plane * kPlane, kRow * kHeads * kBlock, kRow * kBlock, kRow, 2});
    }
    for (uint32_t block = 0; block < layout_.num_blocks; ++block) table_.blocks.push_back(block);
  }

  Sample(const Sample&) = delete;  // the layout points into the memory
  Sample& operator=(const Sample&) = delete;

  Slice slice() const { return {{0}, 0, kHeads, 0, kTokens}; }
  CopyPlan copy_plan() const {
    return CopyPlan(layout_, table_, slice(), tile_ends(0, kTokens, kBlock, 0, kBlock, 0),
                    choose_wire_order(layout_, layout_, false), {0, 1});
  }
  PanelPlan panel_plan() const {
    const CodecSpec defaults;
    PanelFormat format;
    format.codec = static_cast<uint8_t>(kRecommended);
    format.panel_tokens = defaults.panel_tokens;
    format.encodings = encodings_of(kRecommended, layout_.planes, defaults.group, defaults.scale);
    return PanelPlan(layout_, table_, slice(), {0, 1}, format);
  }

  static constexpr uint32_t kHeads = 4, kTokens = 8192, kBlock = 16, kContent = 128;
  static constexpr size_t kBytes = size_t{2} * 2 * kHeads * kTokens * kContent;

 private:
  std::vector<std::byte> memory_;
  CacheLayout layout_;
  BlockTable table_;
};

// The best of a few runs: what disturbs the others would not disturb all of a transfer.
template <class Job>
double bytes_a_second(Job job) {
  Duration best = Duration::max();
  for (int i = 0; i < 3; ++i) {
    const TimePoint start = Clock::now();
    job();
    best = std::min(best, Clock::now() - start);
  }
  const double seconds = std::chrono::duration<double>(best).count();
  return static_cast<double>(Sample::kBytes) / std::max(seconds, 1e-9);
}

CodecRates measure() {
  const Sample source, target;
  const CopyPlan from = source.copy_plan(), to = target.copy_plan();
  const PanelPlan encode = source.panel_plan(), decode = target.panel_plan();
  const uint32_t panels = encode.num_panels();
  std::vector<std::byte> wire(std::max(encode.most_bytes(0, panels), from.wire_bytes()));
  CodecRates rates;
  rates.pack = bytes_a_second([&] { pack(from, 0, from.wire_bytes(), wire.data(), 1); });
  rates.unpack = bytes_a_second([&] { unpack(to, 0, to.wire_bytes(), wire.data(), 1); });
  uint32_t bytes = 0;
  rates.encode =
      bytes_a_second([&] { bytes = pack_panels(encode, 0, panels, wire.data(), 1).bytes; });
  rates.decode = bytes_a_second([&] { unpack_panels(decode, 0, panels, wire.data(), bytes, 1); });
  return rates;
}

double seconds_at(double bytes, double rate) { return rate > 0 ? bytes / rate : 0; }

std::string text(const char* format, double a) {
  char line[64];
  std::snprintf(line, sizeof(line), format, a);
  return line;
}

std::string gbps(double rate) {
  return rate > 0 ? text("%.3g GB/s", rate / 1e9) : "an unknown rate";
}

}  // namespace

const CodecRates& codec_rates() {
  static const CodecRates rates = [] {
    const CodecRates measured = measure();
    rates_known = true;
    return measured;
  }();
  return rates;
}

bool codec_rates_known() { return rates_known; }

CodecChoice choose_codec(const Pipeline& pipeline) {
  if (!pipeline.link) return {Codec::kRaw, "auto: the rate of the link is not known (yet)"};
  const CodecRates& rates = pipeline.rates;
  const double raw =
      std::max({seconds_at(pipeline.bytes, *pipeline.link), seconds_at(pipeline.bytes, rates.pack),
                seconds_at(pipeline.bytes, rates.unpack)});
  const double coded = std::max({seconds_at(pipeline.coded_bytes, *pipeline.link),
                                 seconds_at(pipeline.bytes, rates.encode),
                                 seconds_at(pipeline.bytes, rates.decode)});
  const std::string name = codec_name(kRecommended);
  const bool pays = coded < kWorthIt * raw;
  return {pays ? kRecommended : Codec::kRaw,
          "auto: the link carries " + gbps(*pipeline.link) + ", " + name + " encodes at " +
              gbps(rates.encode) + " and decodes at " + gbps(rates.decode) + ": " +
              text("%.3g ms", raw * 1e3) + " in raw, " + text("%.3g ms", coded * 1e3) + " in " +
              name + (pays ? "" : ", which does not pay")};
}

}  // namespace kvxfer
