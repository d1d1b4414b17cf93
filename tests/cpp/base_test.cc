#include <poll.h>
#include <unistd.h>

#include <doctest/doctest.h>

#include <memory>
#include <set>
#include <string>
#include <vector>

#include "base/byte_io.h"
#include "engine/event_queue.h"
#include "engine/timers.h"
#include "kvxfer/status.h"

namespace kvxfer {
namespace {

std::vector<int> bytes_as_ints(const std::vector<std::byte>& bytes) {
  std::vector<int> out;
  for (const std::byte value : bytes) out.push_back(static_cast<int>(value));
  return out;
}

bool readable(int fd) {
  pollfd waited{fd, POLLIN, 0};
  return ::poll(&waited, 1, 0) == 1;
}

TEST_CASE("integers are written little-endian") {
  ByteWriter out;
  out.put(uint8_t{0x01});
  out.put(uint16_t{0x0203});
  out.put(uint32_t{0x04050607});
  out.put(uint64_t{0x08090a0b0c0d0e0f});
  out.put_signed(-2);
  CHECK(bytes_as_ints(out.take()) == std::vector<int>{1,    3,    2,    7,    6,    5,    4,   15,
                                                      14,   13,   12,   11,   10,   9,    8,   0xfe,
                                                      0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff});
}

TEST_CASE("strings and lists carry their length") {
  ByteWriter out;
  out.put_string("ab");
  out.put_string("");
  const std::vector<uint32_t> list{1, 0x100};
  out.put_list(list);
  const auto bytes = out.take();
  CHECK(bytes_as_ints(bytes) ==
        std::vector<int>{2, 0, 0, 0, 'a', 'b', 0, 0, 0, 0, 2, 0, 0, 0, 1, 0, 0, 0, 0, 1, 0, 0});

  ByteReader in(bytes);
  CHECK(in.get_string(2) == "ab");
  CHECK(in.get_string(0).empty());
  CHECK(in.get_list(2) == list);
  CHECK_NOTHROW(in.expect_end());
}

TEST_CASE("extreme integers survive") {
  ByteWriter out;
  out.put(uint8_t{255});
  out.put(uint16_t{65535});
  out.put(UINT32_MAX);
  out.put(UINT64_MAX);
  out.put_signed(INT64_MIN);
  out.put_signed(INT64_MAX);
  const auto bytes = out.take();
  ByteReader in(bytes);
  CHECK(in.get<uint8_t>() == 255);
  CHECK(in.get<uint16_t>() == 65535);
  CHECK(in.get<uint32_t>() == UINT32_MAX);
  CHECK(in.get<uint64_t>() == UINT64_MAX);
  CHECK(in.get_signed() == INT64_MIN);
  CHECK(in.get_signed() == INT64_MAX);
  in.expect_end();
}

template <class Read>
std::string refusal(const std::vector<std::byte>& bytes, Read read) {
  ByteReader in(bytes);
  try {
    read(in);
  } catch (const Error& error) {
    CHECK(error.code() == StatusCode::kProtocol);
    return error.what();
  }
  return "";
}

TEST_CASE("a reader never goes beyond its bytes") {
  const std::vector<std::byte> three(3, std::byte{1});
  const auto text = [&](auto read) { return refusal(three, read); };
  CHECK(text([](ByteReader& in) { in.get<uint32_t>(); }) ==
        "message ends early: 4 bytes wanted, 3 left");
  CHECK(text([](ByteReader& in) { in.get_signed(); }) != "");
  CHECK(text([](ByteReader& in) { in.get_array<4>(); }) != "");
  CHECK(text([](ByteReader& in) { in.get_array<3>(); }) == "");
  CHECK(text([](ByteReader& in) { in.get_string(100); }) != "");
  CHECK(text([](ByteReader& in) { in.get_list(100); }) != "");
  CHECK(text([](ByteReader& in) { in.expect_end(); }) == "message has 3 bytes too many");
  // What failed has taken nothing.
  ByteReader in(three);
  CHECK_THROWS_AS(in.get<uint64_t>(), Error);
  CHECK(in.get<uint16_t>() == 0x0101);
  CHECK(in.get<uint8_t>() == 1);
  in.expect_end();
  ByteReader empty({});
  CHECK_NOTHROW(empty.expect_end());
  CHECK_THROWS_AS(empty.get<uint8_t>(), Error);
}

TEST_CASE("lengths are held against the limit and against what is there") {
  ByteWriter out;
  out.put_string("abcd");
  const auto text = out.take();
  CHECK(refusal(text, [](ByteReader& in) { in.get_string(3); }).find("of 4 elements") !=
        std::string::npos);
  CHECK(refusal(text, [](ByteReader& in) { in.get_string(4); }) == "");

  ByteWriter count;
  count.put(UINT32_MAX);
  const auto endless = count.take();
  CHECK(refusal(endless, [](ByteReader& in) { in.get_string(UINT32_MAX); }) != "");
  CHECK(refusal(endless, [](ByteReader& in) { in.get_list(UINT32_MAX); }) != "");

  ByteWriter list;
  list.put(uint32_t{2});
  list.put(uint32_t{1});
  const auto half = list.take();
  CHECK(refusal(half, [](ByteReader& in) { in.get_list(2); }) != "");
  // 2^30 elements of 4 bytes are 2^32 bytes: the product must not wrap around.
  const ByteReader in(half);
  CHECK_THROWS_AS(in.check_count(1u << 30, UINT32_MAX, "a list", 4), Error);
  CHECK_THROWS_AS(in.check_count(1, 0, "a list", 1), Error);
  CHECK_NOTHROW(in.check_count(8, 8, "a list", 1));
  CHECK_NOTHROW(in.check_count(0, 0, "a list", 1));
}

TEST_CASE("status names are distinct, and an unknown code has one, too") {
  std::set<std::string> names;
  for (int code = 0; code <= static_cast<int>(StatusCode::kProtocol); ++code) {
    names.insert(status_name(static_cast<StatusCode>(code)));
  }
  CHECK(names.size() == 13);
  CHECK(!names.contains("UNKNOWN"));
  CHECK(std::string(status_name(StatusCode::kOk)) == "OK");
  CHECK(std::string(status_name(StatusCode::kPeerLost)) == "PEER_LOST");
  CHECK(std::string(status_name(StatusCode::kNoResources)) == "NO_RESOURCES");
  CHECK(std::string(status_name(static_cast<StatusCode>(99))) == "UNKNOWN");
  CHECK(Status{}.ok());
  CHECK(!Status{StatusCode::kStale, ""}.ok());
}

TEST_CASE("an event queue collects nothing before its descriptor is asked for") {
  EventQueue queue;
  queue.push(1);
  CHECK(queue.drain().empty());
  const int fd = queue.fd();
  CHECK(queue.fd() == fd);
  CHECK(!readable(fd));
  CHECK(queue.drain().empty());
}

TEST_CASE("an event queue hands out handles once, in order, and its descriptor follows") {
  EventQueue queue;
  const int fd = queue.fd();
  for (uint64_t handle : {3, 1, 2}) queue.push(handle);
  CHECK(readable(fd));
  CHECK(queue.drain() == std::vector<uint64_t>{3, 1, 2});
  CHECK(!readable(fd));
  CHECK(queue.drain().empty());
  queue.push(4);
  CHECK(readable(fd));
  CHECK(queue.drain() == std::vector<uint64_t>{4});
}

TEST_CASE("an event stays readable, also when it is signalled again and again") {
  const UniqueFd event = make_event();
  CHECK(!readable(event.get()));
  for (int i = 0; i < 10; ++i) signal_event(event);
  CHECK(readable(event.get()));
  CHECK(readable(event.get()));
  CHECK_NOTHROW(signal_event(UniqueFd()));
}

const TimePoint kStart{};

TimePoint at(int seconds) { return kStart + std::chrono::seconds(seconds); }

struct Recorder {
  Timers::Action action(int value) {
    return [this, value] { ran.push_back(value); };
  }
  std::vector<int> ran;
};

TEST_CASE("timers run when due, the earliest first, equal ones in the order added") {
  Timers timers;
  Recorder recorder;
  CHECK(timers.next() == kNever);
  timers.add(at(30), recorder.action(4));
  timers.add(at(10), recorder.action(1));
  timers.add(at(20), recorder.action(2));
  timers.add(at(20), recorder.action(3));
  CHECK(timers.next() == at(10));
  timers.run_due(at(9));
  CHECK(recorder.ran.empty());
  timers.run_due(at(20));
  CHECK(recorder.ran == std::vector<int>{1, 2, 3});
  CHECK(timers.next() == at(30));
  timers.run_due(at(1000));
  CHECK(recorder.ran == std::vector<int>{1, 2, 3, 4});
  CHECK(timers.next() == kNever);
  timers.run_due(at(2000));
  CHECK(recorder.ran.size() == 4);
}

TEST_CASE("a timer that is cancelled does not run") {
  Timers timers;
  Recorder recorder;
  const auto first = timers.add(at(1), recorder.action(1));
  const auto second = timers.add(at(1), recorder.action(2));
  timers.add(at(1), recorder.action(3));
  timers.cancel(second);
  timers.run_due(at(1));
  CHECK(recorder.ran == std::vector<int>{1, 3});
  timers.cancel(timers.add(at(2), recorder.action(4)));
  CHECK(timers.next() == kNever);
  (void)first;
}

TEST_CASE("an action may cancel timers, those that are due as well") {
  Timers timers;
  Recorder recorder;
  std::vector<Timers::Id> others;
  timers.add(at(1), [&] {
    recorder.ran.push_back(1);
    for (const auto& id : others) timers.cancel(id);
  });
  others.push_back(timers.add(at(1), recorder.action(2)));
  others.push_back(timers.add(at(5), recorder.action(3)));
  timers.add(at(1), recorder.action(4));
  timers.run_due(at(10));
  CHECK(recorder.ran == std::vector<int>{1, 4});
  CHECK(timers.next() == kNever);
}

TEST_CASE("an action may add timers, which run in the same go when they are due") {
  Timers timers;
  Recorder recorder;
  timers.add(at(1), [&] {
    recorder.ran.push_back(1);
    timers.add(at(1), recorder.action(2));
    timers.add(kStart, recorder.action(3));
    timers.add(at(7), recorder.action(4));
  });
  timers.run_due(at(5));
  CHECK(recorder.ran == std::vector<int>{1, 3, 2});
  CHECK(timers.next() == at(7));
}

TEST_CASE("an action's captures live until it has run") {
  Timers timers;
  const auto shared = std::make_shared<int>(7);
  int seen = 0;
  timers.add(at(1), [shared, &seen] { seen = *shared; });
  CHECK(shared.use_count() == 2);
  timers.run_due(at(1));
  CHECK(seen == 7);
  CHECK(shared.use_count() == 1);
}

}  // namespace
}  // namespace kvxfer
