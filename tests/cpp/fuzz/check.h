#ifndef KVXFER_TESTS_FUZZ_CHECK_H_
#define KVXFER_TESTS_FUZZ_CHECK_H_

#include <algorithm>
#include <cstdio>
#include <cstdlib>

#include "kvxfer/status.h"

// Ends the process, which the fuzzer takes for a finding.
inline void check(bool good, const char* what) {
  if (good) return;
  std::fprintf(stderr, "check failed: %s\n", what);
  std::abort();
}

// Runs `action`, which may refuse its input as a violation of the protocol and in no other way.
template <typename Action>
void refused_or(Action&& action) {
  try {
    action();
  } catch (const kvxfer::Error& error) {
    check(error.code() == kvxfer::StatusCode::kProtocol, error.what());
  }
}

#endif  // KVXFER_TESTS_FUZZ_CHECK_H_
