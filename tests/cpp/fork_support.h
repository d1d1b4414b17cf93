#ifndef KVXFER_TESTS_FORK_SUPPORT_H_
#define KVXFER_TESTS_FORK_SUPPORT_H_

namespace kvxfer::testing {

// ThreadSanitizer ends a forked child that makes threads.
#if defined(__SANITIZE_THREAD__)
constexpr bool kCanForkThreads = false;
#else
constexpr bool kCanForkThreads = true;
#endif

}  // namespace kvxfer::testing

#endif  // KVXFER_TESTS_FORK_SUPPORT_H_
