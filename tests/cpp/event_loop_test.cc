#include "base/event_loop.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/epoll.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <doctest/doctest.h>

#include <atomic>
#include <functional>
#include <thread>
#include <vector>

#include "base/thread_pool.h"
#include "base/unique_fd.h"
#include "fork_support.h"
#include "kvxfer/status.h"

namespace kvxfer {
namespace {

using std::chrono::milliseconds;

struct Pipe {
  Pipe() {
    int fds[2];
    REQUIRE(::pipe2(fds, O_CLOEXEC | O_NONBLOCK) == 0);
    reader = UniqueFd(fds[0]);
    writer = UniqueFd(fds[1]);
  }
  void put() { REQUIRE(::write(writer.get(), "x", 1) == 1); }
  UniqueFd reader, writer;
};

bool eventually(const std::function<bool()>& condition) {
  for (int i = 0; i < 2000; ++i) {
    if (condition()) return true;
    std::this_thread::sleep_for(milliseconds(5));
  }
  return false;
}

TEST_CASE("milliseconds are rounded up, bounded, and endless for kNever") {
  const TimePoint now = Clock::now();
  CHECK(millis_until(kNever, now) == -1);
  CHECK(millis_until(now, now) == 0);
  CHECK(millis_until(now - milliseconds(5), now) == 0);
  CHECK(millis_until(now + std::chrono::microseconds(1), now) == 1);
  CHECK(millis_until(now + milliseconds(7), now) == 7);
  CHECK(millis_until(now + std::chrono::hours(100'000), now) == 3'600'000);
}

TEST_CASE("tasks run in the order posted, on the loop's thread") {
  EventLoop loop("test");
  std::vector<int> ran;
  std::atomic<bool> inside{true};
  for (int i = 0; i < 100; ++i) {
    loop.post([&, i] {
      ran.push_back(i);
      inside = inside && loop.in_loop();
    });
  }
  loop.post([&] { loop.post([&] { ran.push_back(100); }); });
  loop.stop();
  REQUIRE(ran.size() == 101);
  for (int i = 0; i < 101; ++i) CHECK(ran[static_cast<size_t>(i)] == i);
  CHECK(inside);
  CHECK_FALSE(loop.in_loop());
  CHECK_FALSE(loop.post([] {}));
}

TEST_CASE("handlers are called for their events until removed") {
  Pipe pipe;
  EventLoop loop("test");
  std::atomic<int> bytes{0};
  loop.add(pipe.reader.get(), EPOLLIN, [&](uint32_t events) {
    CHECK((events & EPOLLIN) != 0);
    char buffer[16];
    bytes += static_cast<int>(::read(pipe.reader.get(), buffer, sizeof(buffer)));
  });
  for (int i = 0; i < 10; ++i) pipe.put();
  CHECK(eventually([&] { return bytes == 10; }));
  loop.modify(pipe.reader.get(), 0);
  pipe.put();
  std::this_thread::sleep_for(milliseconds(10));
  CHECK(bytes == 10);
  loop.modify(pipe.reader.get(), EPOLLIN);
  CHECK(eventually([&] { return bytes == 11; }));
  loop.remove(pipe.reader.get());
  pipe.put();
  std::this_thread::sleep_for(milliseconds(10));
  CHECK(bytes == 11);
  CHECK_THROWS_AS(loop.add(-1, EPOLLIN, [](uint32_t) {}), Error);
}

TEST_CASE("remove returns when the handler does not run any more") {
  EventLoop loop("test");
  for (int round = 0; round < 50; ++round) {
    Pipe pipe;
    std::atomic<bool> entered{false}, removed{false}, late{false};
    loop.add(pipe.reader.get(), EPOLLIN, [&](uint32_t) {
      entered = true;
      std::this_thread::sleep_for(std::chrono::microseconds(200));
      late = late || removed;
    });
    pipe.put();
    while (!entered) std::this_thread::yield();
    loop.remove(pipe.reader.get());
    removed = true;
    CHECK_FALSE(late);
  }
}

TEST_CASE("a handler may remove itself, and one whose event is already there") {
  Pipe first, second;
  EventLoop loop("test");
  std::atomic<int> calls{0};
  const auto handler = [&](uint32_t) {
    ++calls;
    loop.remove(first.reader.get());
    loop.remove(second.reader.get());
  };
  first.put();
  second.put();
  loop.post([&] {
    loop.add(first.reader.get(), EPOLLIN, handler);
    loop.add(second.reader.get(), EPOLLIN, handler);
  });
  CHECK(eventually([&] { return calls == 1; }));
  std::this_thread::sleep_for(milliseconds(10));
  CHECK(calls == 1);
}

TEST_CASE("the tick comes when it asked to, and after each wake") {
  EventLoop loop("test");
  std::atomic<int> ticks{0};
  loop.set_tick([&] {
    ++ticks;
    return Clock::now() + milliseconds(5);
  });
  CHECK(eventually([&] { return ticks >= 5; }));
  loop.set_tick([&] {
    ++ticks;
    return kNever;
  });
  std::this_thread::sleep_for(milliseconds(20));
  const int before = ticks;
  std::this_thread::sleep_for(milliseconds(30));
  CHECK(ticks == before);
  loop.wake();
  CHECK(eventually([&] { return ticks == before + 1; }));
  loop.set_tick(nullptr);
  loop.wake();
  std::this_thread::sleep_for(milliseconds(10));
  CHECK(ticks == before + 1);
}

TEST_CASE("timed tasks run in the order of their times, not early") {
  EventLoop loop("test");
  const TimePoint start = Clock::now();
  std::vector<int> ran;
  std::atomic<bool> early{false};
  std::atomic<int> count{0};
  for (const int wait : {30, 10, 20}) {
    loop.post_at(start + milliseconds(wait), [&, wait] {
      ran.push_back(wait);
      early = early || Clock::now() < start + milliseconds(wait);
      ++count;
    });
  }
  loop.post_at(start + std::chrono::hours(1), [&] { ++count; });
  CHECK(eventually([&] { return count == 3; }));
  loop.stop();
  CHECK(count == 3);
  CHECK(ran == std::vector<int>{10, 20, 30});
  CHECK_FALSE(early);
}

TEST_CASE("an idle loop uses no processor time") {
  EventLoop loop("test");
  loop.set_tick([] { return Clock::now() + milliseconds(500); });
  std::this_thread::sleep_for(milliseconds(20));
  rusage before{}, after{};
  ::getrusage(RUSAGE_SELF, &before);
  std::this_thread::sleep_for(milliseconds(300));
  ::getrusage(RUSAGE_SELF, &after);
  const auto micros = [](const timeval& time) { return time.tv_sec * 1'000'000 + time.tv_usec; };
  const auto used = micros(after.ru_utime) + micros(after.ru_stime) - micros(before.ru_utime) -
                    micros(before.ru_stime);
  CHECK(used < 30'000);
}

TEST_CASE("a loop and a pool may be destroyed by their own tasks") {
  std::atomic<int> done{0};
  auto loop = std::make_shared<EventLoop>("test");
  EventLoop& raw_loop = *loop;
  raw_loop.post([&, own = std::move(loop)]() mutable {
    own.reset();
    ++done;
  });
  auto pool = std::make_shared<ThreadPool>(2, "test");
  ThreadPool& raw_pool = *pool;
  raw_pool.submit([&, own = std::move(pool)]() mutable {
    own.reset();
    ++done;
  });
  CHECK(eventually([&] { return done == 2; }));
}

TEST_CASE("a pool runs everything, and what is queued when it stops") {
  std::atomic<int> ran{0};
  ThreadPool pool(3, "test");
  CHECK(pool.size() == 3);
  for (int i = 0; i < 1000; ++i) CHECK(pool.submit([&] { ++ran; }));
  pool.stop();
  CHECK(ran == 1000);
  CHECK_FALSE(pool.submit([&] { ++ran; }));

  std::vector<int> order;
  ThreadPool one(1, "test");
  for (int i = 0; i < 100; ++i) one.submit([&, i] { order.push_back(i); });
  one.stop();
  for (int i = 0; i < 100; ++i) CHECK(order[static_cast<size_t>(i)] == i);
}

TEST_CASE("signals go to the program's own threads") {
  EventLoop loop("test");
  ThreadPool pool(1, "test");
  std::atomic<int> blocked{0};
  const auto look = [&] {
    sigset_t mask;
    pthread_sigmask(SIG_SETMASK, nullptr, &mask);
    blocked += sigismember(&mask, SIGINT) && sigismember(&mask, SIGCHLD);
  };
  loop.post(look);
  pool.submit(look);
  loop.stop();
  pool.stop();
  CHECK(blocked == 2);
}

TEST_CASE("a forked child owns none of the parent's descriptors and waits for none of its threads" *
          doctest::skip(!testing::kCanForkThreads)) {
  Pipe pipe;
  EventLoop loop("test");
  ThreadPool pool(1, "test");
  const int fd = pipe.reader.get();
  const uint64_t generation = fork_generation();
  const pid_t child = ::fork();
  if (child == 0) {
    const bool closed = ::fcntl(fd, F_GETFD) < 0;
    const bool forgotten = pipe.reader.get() == -1 && fork_generation() == generation + 1;
    // The number is taken again; the inherited owner must leave it alone.
    const int again = ::open("/dev/null", O_RDONLY | O_CLOEXEC);
    ::dup2(again, fd);
    pipe.reader.reset();
    const bool left_alone = ::fcntl(fd, F_GETFD) >= 0;
    loop.wake();
    const bool refused = !loop.post([] {}) && !pool.submit([] {});
    loop.stop();
    pool.stop();
    EventLoop fresh("child");
    std::atomic<bool> ran{false};
    fresh.post([&] { ran = true; });
    fresh.stop();
    ::_exit(closed && forgotten && left_alone && refused && ran ? 0 : 1);
  }
  int status = -1;
  REQUIRE(::waitpid(child, &status, 0) == child);
  CHECK(status == 0);
  CHECK(::fcntl(fd, F_GETFD) >= 0);
}

}  // namespace
}  // namespace kvxfer
