#define DOCTEST_CONFIG_IMPLEMENT
#include <chrono>
#include <condition_variable>
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <string>
#include <thread>

#include <doctest/doctest.h>

namespace {

// A test that hangs must end the run and be named. Aborting gives a core or a debugger all threads.
class Watchdog {
 public:
  Watchdog() : thread_([this] { watch(); }) {}
  ~Watchdog() {
    {
      std::lock_guard lock(mutex_);
      done_ = true;
    }
    changed_.notify_all();
    thread_.join();
  }

  void begin(const char* name) { set(name); }
  void end() { set(""); }

 private:
  void set(const char* name) {
    std::lock_guard lock(mutex_);
    name_ = name;
    ++generation_;
    changed_.notify_all();
  }

  void watch() {
    std::unique_lock lock(mutex_);
    while (!done_) {
      const uint64_t seen = generation_;
      // By the second, so that the time in which this process stood still does not count.
      bool moved = false;
      for (auto left = limit_.count(); left > 0 && !moved; --left) {
        moved = changed_.wait_for(lock, std::chrono::seconds(1),
                                  [&] { return done_ || generation_ != seen; });
      }
      if (!moved && !name_.empty()) {
        std::fprintf(stderr, "test \"%s\" ran for more than %lld s: aborting\n", name_.c_str(),
                     static_cast<long long>(limit_.count()));
        lock.unlock();
        std::signal(SIGABRT, SIG_DFL);  // doctest's handler would run listeners in this thread
        std::abort();
      }
    }
  }

  static std::chrono::seconds limit() {
    const char* value = std::getenv("KVXFER_TEST_TIMEOUT");
    return std::chrono::seconds(value ? std::atoll(value) : 120);
  }

  const std::chrono::seconds limit_ = limit();
  std::mutex mutex_;
  std::condition_variable changed_;
  std::string name_;
  uint64_t generation_ = 0;
  bool done_ = false;
  std::thread thread_;
};

Watchdog* g_watchdog = nullptr;

class WatchdogListener : public doctest::IReporter {
 public:
  explicit WatchdogListener(const doctest::ContextOptions&) {}
  void report_query(const doctest::QueryData&) override {}
  void test_run_start() override {}
  void test_run_end(const doctest::TestRunStats&) override {}
  void test_case_start(const doctest::TestCaseData& test) override {
    g_watchdog->begin(test.m_name);
  }
  void test_case_reenter(const doctest::TestCaseData&) override {}
  void test_case_end(const doctest::CurrentTestCaseStats&) override { g_watchdog->end(); }
  void test_case_exception(const doctest::TestCaseException&) override {}
  void subcase_start(const doctest::SubcaseSignature&) override {}
  void subcase_end() override {}
  void log_assert(const doctest::AssertData&) override {}
  void log_message(const doctest::MessageData&) override {}
  void test_case_skipped(const doctest::TestCaseData&) override {}
};

REGISTER_LISTENER("watchdog", 1, WatchdogListener);

}  // namespace

int main(int argc, char** argv) {
  Watchdog watchdog;
  g_watchdog = &watchdog;
  doctest::Context context(argc, argv);
  return context.run();
}
