// What the benchmark compares with, compiled so that no interpreter stands in the timed loops.
// Built by native.py into a temporary directory with the system's C compiler.

#include <errno.h>
#include <pthread.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <sys/socket.h>

#define KVB_MAX_STREAMS 16

void kvb_copy(char* dst, const char* src, size_t bytes) { memcpy(dst, src, bytes); }

void kvb_scattered_copy(char* dst, const uint64_t* dst_offsets, const char* src,
                        const uint64_t* src_offsets, size_t runs, size_t run_bytes) {
  for (size_t i = 0; i < runs; ++i) {
    memcpy(dst + dst_offsets[i], src + src_offsets[i], run_bytes);
  }
}

// Index of the first run that differs, or -1.
int64_t kvb_scattered_mismatch(const char* a, const uint64_t* a_offsets, const char* b,
                               const uint64_t* b_offsets, size_t runs, size_t run_bytes) {
  for (size_t i = 0; i < runs; ++i) {
    if (memcmp(a + a_offsets[i], b + b_offsets[i], run_bytes) != 0) return (int64_t)i;
  }
  return -1;
}

// Index of the first run that holds a byte other than `value`, or -1.
int64_t kvb_scattered_not_value(const char* a, const uint64_t* offsets, size_t runs,
                                size_t run_bytes, int value) {
  for (size_t i = 0; i < runs; ++i) {
    const unsigned char* p = (const unsigned char*)a + offsets[i];
    if (run_bytes == 0) continue;
    if (p[0] != value || memcmp(p, p + 1, run_bytes - 1) != 0) return (int64_t)i;
  }
  return -1;
}

struct share {
  int fd;
  int sending;
  char* data;
  size_t bytes;
  size_t call_bytes;
  int error;
};

static void* move_share(void* argument) {
  struct share* s = argument;
  size_t done = 0;
  while (done < s->bytes) {
    size_t want = s->bytes - done;
    if (want > s->call_bytes) want = s->call_bytes;
    ssize_t got = s->sending ? send(s->fd, s->data + done, want, MSG_NOSIGNAL)
                             : recv(s->fd, s->data + done, want, 0);
    if (got < 0 && errno == EINTR) continue;
    if (got <= 0) {
      s->error = got == 0 ? ECONNRESET : errno;
      return NULL;
    }
    done += (size_t)got;
  }
  return NULL;
}

static int move_all(const int* fds, size_t streams, char* data, size_t bytes, size_t call_bytes,
                    int sending) {
  struct share shares[KVB_MAX_STREAMS];
  pthread_t threads[KVB_MAX_STREAMS];
  if (streams == 0 || streams > KVB_MAX_STREAMS || bytes % streams != 0) return EINVAL;
  size_t each = bytes / streams;
  int error = 0;
  size_t started = 0;
  for (size_t i = 0; i < streams; ++i) {
    shares[i] = (struct share){fds[i], sending, data + i * each, each, call_bytes, 0};
  }
  for (size_t i = 1; i < streams && error == 0; ++i) {
    error = pthread_create(&threads[i], NULL, move_share, &shares[i]);
    if (error == 0) started = i;
  }
  if (error == 0) move_share(&shares[0]);
  for (size_t i = 1; i <= started; ++i) pthread_join(threads[i], NULL);
  for (size_t i = 0; i < streams && error == 0; ++i) error = shares[i].error;
  return error;
}

// Each of `streams` blocking sockets carries an equal contiguous share on a thread of its own, in
// calls of at most `call_bytes`. Returns 0 or an errno; the sockets' time-outs bound the wait.
int kvb_send_all(const int* fds, size_t streams, char* src, size_t bytes, size_t call_bytes) {
  return move_all(fds, streams, src, bytes, call_bytes, 1);
}

int kvb_recv_all(const int* fds, size_t streams, char* dst, size_t bytes, size_t call_bytes) {
  return move_all(fds, streams, dst, bytes, call_bytes, 0);
}
