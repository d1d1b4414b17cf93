#ifndef KVXFER_STATUS_H_
#define KVXFER_STATUS_H_

#include <cstdint>
#include <stdexcept>
#include <string>
#include <utility>

namespace kvxfer {

// Why something ended. The values travel on the wire (docs/wire_protocol.md): append, never
// renumber.
enum class StatusCode : uint8_t {
  kOk = 0,
  kCancelled = 1,     // the caller, or the other side's owner, ended it
  kTimeout = 2,       // the deadline passed
  kStale = 3,         // the ticket names an offer, generation or incarnation that is gone
  kExpired = 4,       // the offer's lease ran out
  kMismatch = 5,      // the two sides' caches do not fit together, or the slice is not held
  kCorrupt = 6,       // a digest did not match
  kPeerLost = 7,      // the peer died, or fell silent for longer than the heartbeat allows
  kUnreachable = 8,   // the peer could not be reached or refused the handshake
  kClosed = 9,        // the agent is closed
  kInvalid = 10,      // the caller's arguments make no sense
  kNoResources = 11,  // memory, slots or descriptors ran out
  kProtocol = 12,     // the peer sent something that is not the protocol
  kWithdrawn = 13,    // the offer that the ticket promised will not be made
  kBusy = 14,         // the producer has too much to do: the same may work a little later
};
constexpr StatusCode kLastStatus = StatusCode::kBusy;

// Name of a code as Python and the logs show it, e.g. "PEER_LOST".
const char* status_name(StatusCode code);

// Outcome of a transfer. `message` says what was asked, what was found and what to do.
struct [[nodiscard]] Status {
  StatusCode code = StatusCode::kOk;
  std::string message;

  bool ok() const { return code == StatusCode::kOk; }
};

// Thrown for programming errors and set-up failures only; transfers report a Status instead.
class Error : public std::runtime_error {
 public:
  Error(StatusCode code, const std::string& message) : std::runtime_error(message), code_(code) {}
  StatusCode code() const { return code_; }

 private:
  StatusCode code_;
};

}  // namespace kvxfer

#endif  // KVXFER_STATUS_H_
