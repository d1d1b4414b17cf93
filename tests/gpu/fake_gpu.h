#ifndef KVXFER_TESTS_GPU_FAKE_GPU_H_
#define KVXFER_TESTS_GPU_FAKE_GPU_H_

#include <array>
#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <optional>
#include <random>
#include <set>
#include <string>
#include <thread>

namespace kvxfer::fake {

// What goes wrong, in no vendor's numbers.
enum class Problem : uint8_t {
  kNone,
  kInvalidValue,
  kInvalidContext,  // no device is current, or a stream is another's
  kInvalidHandle,
  kOutOfMemory,
  kNotFound,
  kNotReady,
  kLost,                // the device is gone
  kCaptureUnsupported,  // a call that a capture forbids
  kCaptureInvalidated,  // that of a graph, by such a call
  kAlreadyMapped,       // memory of another process, for this device
};

// Devices whose memory is the host's, closed to everybody but their own work: who reads or writes
// it directly gets a SIGSEGV, as with a real one. All work of all streams is done by one thread,
// late, and in any order that streams allow. Nothing is checked that a real driver does not check.
class FakeGpus {
 public:
  enum class Kind : uint8_t { kDevice, kPinned };
  struct Memory {
    Kind kind = Kind::kDevice;
    int device = 0;
    uintptr_t base = 0;
    size_t bytes = 0;
    int fd = -1;  // of what is behind a device's
    // In it the memory begins so much later: an allocator cuts several out of one.
    size_t lead = 0;
    // Of memory of another process: that, its descriptor there, and for which device it was opened.
    int owner = 0;
    int owners_fd = -1;
    int used_on = 0;
    // Cut out of what others are cut out of, too: see adjacent().
    bool from_pool = false;
    bool exported = false;
  };
  using IpcHandle = std::array<std::byte, 64>;
  struct Stream {
    int device = 0;
    std::deque<std::function<void()>> work;
  };
  struct Event {
    int device = 0;
    uint64_t recorded = 0;
    uint64_t happened = 0;
    bool captured = false;
  };
  // Of a graph. What threads in the mode "global" must not do while one is captured in that mode,
  // by any thread, and in the mode "thread local" while they capture one, invalidates it.
  struct Capture {
    int mode = 0;
    std::thread::id thread;
    bool valid = true;
  };
  enum CaptureMode : uint8_t { kGlobal, kThreadLocal, kRelaxed };

  static FakeGpus& instance();

  int count() const { return count_; }

  // The devices that are current on this thread, the innermost last.
  static std::deque<int>& current();

  // That of this thread.
  static int& capture_mode();

  // Whether the call is to fail; every entry point begins with it.
  Problem enter(const std::string& call);
  // The nth call from now on of that name fails, 0 is the next one, and so many in all.
  void fail(const std::string& call, Problem problem, uint32_t nth, uint32_t times = 1);
  // How often it was called.
  uint64_t calls(const std::string& call);
  // Calls of that name do not return; null lets them go.
  void stall(const char* call);
  // Until they are back, every call fails. What they had been told and not done yet they never do.
  void lose_devices(bool lost);
  // All that is to go wrong from here on.
  void forget_faults();
  // Nothing that the stream was told happens until it is let go; null is all streams.
  void hold(void* stream, bool held);
  // The same for all streams of a device.
  void hold_device(int device, bool held);

  // `lead`: a multiple of the page, see Memory.
  Problem allocate(Kind kind, size_t bytes, uintptr_t& base, size_t lead = 0);
  Problem release(uintptr_t base, Kind kind);
  // What is allocated on a device from now on follows what was allocated there before, without a
  // gap; it has no handle for other processes.
  void adjacent(bool adjacent);
  std::optional<Memory> find(uintptr_t address);
  // Between processes.
  Problem export_handle(uintptr_t address, IpcHandle& handle);
  Problem open_handle(const IpcHandle& handle, unsigned flags, uintptr_t& base);
  Problem close_handle(uintptr_t base);  // waits for the device
  // What is opened is other memory than what was asked for.
  void open_wrongly(bool wrong);
  // What is written into memory that is opened from now on does not arrive there.
  void lose_writes(bool lose);
  // Each export answers the last one's handle.
  void repeat_handles(bool repeat);
  // Memory of this process that others have open, and that was freed while they had.
  uint64_t opened() const { return opened_by_us_; }
  uint64_t early_frees() const { return early_frees_; }
  // Flips a bit in every 64th byte of the largest allocation, but for its last 64 bytes.
  void damage();
  // Flips so many bits in memory that processes share, anywhere in it.
  void damage_shared(uint32_t bits);
  // So many copies of more than a KiB from a device to the host leave the last 16 bytes out.
  void lose_copied(uint32_t times);
  // Whether `bytes` bytes copied between these are to be fewer, and how many then.
  size_t copied(const void* to, const void* from, size_t bytes);

  // A descriptor of what is behind the memory of a device, which stands at its begin, and where in
  // it `address` is. Who maps it writes where kernels read.
  Problem export_memory(uintptr_t address, size_t bytes, int& fd, size_t& offset);

  // Calls whoever wants to know that adapters' writes were flushed.
  void on_flush(void (*hook)());
  void flushed();

  Problem create_stream(void*& stream);
  Problem destroy_stream(void* stream);
  Problem begin_capture(void* stream, int mode);
  Problem end_capture(void* stream);
  bool is_capturing(void* stream);
  Problem create_event(void*& event);
  Problem destroy_event(void* event);
  Problem record(void* event, void* stream);
  Problem query(void* event);
  Problem submit(void* stream, std::function<void()> work);
  Problem launch(void* function, uint32_t groups_x, uint32_t groups_y, uint32_t threads,
                 void** arguments, void* stream);

  Problem load_module(const void* code, void*& module);
  Problem unload_module(void* module);
  Problem find_function(void* module, const std::string& name, void*& function);

  // Allocations, streams, events, modules that are there.
  size_t open_handles();

 private:
  FakeGpus();
  void run();
  void open_memory(bool open);
  Problem allocate_in_pool(size_t bytes, uintptr_t& base);
  Stream* find_stream(void* stream);
  Problem disturb_captures();

  const int count_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::mt19937 random_{1};
  std::map<uintptr_t, Memory> memory_;
  std::map<void*, Stream> streams_;
  std::map<void*, Event> events_;
  std::map<void*, Capture> captures_;  // by their streams
  std::set<void*> modules_;
  struct Failure {
    uint32_t nth = 0;
    uint32_t times = 1;
    Problem problem = Problem::kNone;
  };
  std::map<std::string, Failure> failures_;
  std::map<std::string, uint64_t> calls_;
  std::string stalled_;
  bool wrongly_ = false, lose_writes_ = false;
  bool repeat_handles_ = false;
  IpcHandle last_handle_{};
  bool adjacent_ = false;
  int pool_ = -1;  // the descriptor; as long as something is allocated there
  uintptr_t pool_begin_ = 0;
  size_t pool_used_ = 0;
  std::atomic<void (*)()> on_flush_ = nullptr;
  uint32_t copies_to_lose_ = 0;
  std::atomic<uint64_t> opened_by_us_ = 0, early_frees_ = 0;
  bool lost_ = false;
  bool all_held_ = false;
  std::set<void*> held_;
  std::set<int> held_devices_;
  uintptr_t next_handle_ = 0x1000;
};

// What a kernel does with its arguments, which are copied; null for a name that there is not.
using Kernel = std::function<void(uint32_t groups_x, uint32_t groups_y)> (*)(void** arguments);
Kernel find_kernel(const std::string& name);

}  // namespace kvxfer::fake

#endif  // KVXFER_TESTS_GPU_FAKE_GPU_H_
