// What is remembered of trials of GPU memory, and for how long.

#include "engine/gpu_trials.h"

#include <doctest/doctest.h>

#include <chrono>

#include "fake_link.h"

namespace kvxfer {
namespace {

struct Adapters : testing::FakeLink {
  explicit Adapters(const char* given) : FakeLink(true), names(given) {}
  std::string adapters() const override { return names; }
  const std::string names;
};

constexpr auto kSource = Link::DirectUse::kSource, kTarget = Link::DirectUse::kTarget;

TEST_CASE("gpu trials: each way, use and set of adapters is tried for itself") {
  GpuTrials trials;
  const Adapters one("mlx5_0"), both("mlx5_0, mlx5_1");
  CHECK(trials.ahead(GpuDirect::kAuto, one, kSource));
  trials.put({GpuDirect::kDmaBuf, kSource, one.names}, "", kNever);
  CHECK(trials.find({GpuDirect::kDmaBuf, kSource, one.names}) == "");
  CHECK(!trials.find({GpuDirect::kPeerMemory, kSource, one.names}));
  CHECK(!trials.ahead(GpuDirect::kAuto, one, kSource));
  CHECK(!trials.ahead(GpuDirect::kDmaBuf, one, kSource));
  CHECK(trials.ahead(GpuDirect::kPeerMemory, one, kSource));
  CHECK(trials.ahead(GpuDirect::kAuto, one, kTarget));
  CHECK(trials.ahead(GpuDirect::kAuto, both, kSource));
}

TEST_CASE("gpu trials: a failure holds until its time, and the other way comes next") {
  GpuTrials trials;
  const Adapters link("mlx5_0");
  const GpuTrials::Key dmabuf{GpuDirect::kDmaBuf, kTarget, link.names};
  const GpuTrials::Key peermem{GpuDirect::kPeerMemory, kTarget, link.names};
  trials.put(dmabuf, "wrong bytes", kNever);
  CHECK(trials.find(dmabuf) == "wrong bytes");
  CHECK(trials.ahead(GpuDirect::kAuto, link, kTarget));
  CHECK(!trials.ahead(GpuDirect::kDmaBuf, link, kTarget));
  trials.put(peermem, "no module", Clock::now() + std::chrono::hours(1));
  CHECK(trials.find(peermem) == "no module");
  CHECK(!trials.ahead(GpuDirect::kAuto, link, kTarget));
  trials.put(peermem, "no module", Clock::now());
  CHECK(!trials.find(peermem));
  CHECK(trials.ahead(GpuDirect::kAuto, link, kTarget));
  trials.put(peermem, "", kNever);
  CHECK(!trials.ahead(GpuDirect::kAuto, link, kTarget));
}

}  // namespace
}  // namespace kvxfer
