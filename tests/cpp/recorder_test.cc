#include "engine/recorder.h"

#include <doctest/doctest.h>

#include <array>
#include <chrono>
#include <cstddef>
#include <string>
#include <thread>
#include <vector>

namespace kvxfer {
namespace {

std::array<std::byte, 16> generation(uint8_t first) {
  std::array<std::byte, 16> bytes{};
  bytes[0] = std::byte{first};
  return bytes;
}

TEST_CASE("recorder: the newest events stay, oldest first") {
  Recorder recorder(8);
  for (uint32_t i = 0; i < 20; ++i) recorder.add(TraceKind::kPack, generation(1), {.chunk = i});
  const Trace trace = recorder.trace();
  CHECK(trace.dropped == 12);
  REQUIRE(trace.events.size() == 8);
  for (uint32_t i = 0; i < 8; ++i) {
    CHECK(trace.events[i].chunk == 12 + i);
    if (i > 0) CHECK(trace.events[i].nanos >= trace.events[i - 1].nanos);
  }
  CHECK(recorder.metrics().counts[static_cast<size_t>(TraceKind::kPack)] == 20);
}

TEST_CASE("recorder: requests are told apart, by a number that is not their generation") {
  Recorder recorder(8);
  recorder.add(TraceKind::kOffer, generation(1));
  recorder.add(TraceKind::kOffer, generation(2));
  recorder.add(TraceKind::kRelease, generation(1));
  const auto events = recorder.trace().events;
  CHECK(events[0].request != events[1].request);
  CHECK(events[0].request == events[2].request);
  CHECK(events[0].request != 1);
}

TEST_CASE("recorder: the number of a request is SipHash-2-4, so no half of its generation shows") {
  std::array<std::byte, 16> key;
  for (size_t i = 0; i < key.size(); ++i) key[i] = static_cast<std::byte>(i);
  Recorder recorder(8);
  recorder.add(TraceKind::kOffer, key);
  CHECK(recorder.trace().events[0].request == 0x726FDB47DD0E0E31u);  // the authors' first vector
}

TEST_CASE("recorder: names are cut off, and durations follow from their beginning") {
  Recorder recorder(8);
  const TimePoint began = Clock::now() - std::chrono::milliseconds(3);
  recorder.add(TraceKind::kPublish, generation(1), {.began = began, .name = std::string(50, 'x')});
  recorder.add(TraceKind::kFail, generation(1), {.code = StatusCode::kTimeout});
  const auto events = recorder.trace().events;
  CHECK(std::string(events[0].name.begin(), events[0].name.end()) == std::string(kTraceName, 'x'));
  CHECK(events[0].duration_nanos >= 3'000'000);
  CHECK(events[1].duration_nanos == 0);
  const AgentMetrics metrics = recorder.metrics();
  CHECK(metrics.fetch_ends.at(StatusCode::kOk) == 1);
  CHECK(metrics.fetch_ends.at(StatusCode::kTimeout) == 1);
  uint64_t timed = 0;
  for (const uint64_t count : metrics.fetch_seconds.counts) timed += count;
  CHECK(timed == 1);
  CHECK(metrics.fetch_seconds.sum >= 0.003);
}

TEST_CASE("histogram: each duration is in the first bucket that holds it") {
  Histogram histogram;
  for (size_t i = 0; i < Histogram::kBounds; ++i) {
    histogram.add(Histogram::bound(i));          // just fits
    histogram.add(Histogram::bound(i) * 1.001);  // just doesn't
  }
  CHECK(histogram.counts[0] == 1);
  for (size_t i = 1; i < Histogram::kBounds; ++i) CHECK(histogram.counts[i] == 2);
  CHECK(histogram.counts[Histogram::kBounds] == 1);
}

TEST_CASE("recorder: threads lose no count") {
  Recorder recorder(16);
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&] {
      for (int i = 0; i < 500; ++i) recorder.add(TraceKind::kVerify, generation(1));
    });
  }
  for (std::thread& thread : threads) thread.join();
  CHECK(recorder.metrics().counts[static_cast<size_t>(TraceKind::kVerify)] == 2000);
  CHECK(recorder.trace().dropped == 2000 - 16);
}

}  // namespace
}  // namespace kvxfer
