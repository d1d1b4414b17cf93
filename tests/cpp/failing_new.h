#ifndef KVXFER_TESTS_CPP_FAILING_NEW_H_
#define KVXFER_TESTS_CPP_FAILING_NEW_H_

// Lets the n-th operator new of the calling thread from now on throw std::bad_alloc, counted from
// 0; negative: none. False in sanitized programs, whose operator new is the sanitizer's.
bool fail_new(int n);

#endif  // KVXFER_TESTS_CPP_FAILING_NEW_H_
