#include "kvxfer/status.h"

namespace kvxfer {

const char* status_name(StatusCode code) {
  switch (code) {
    case StatusCode::kOk: return "OK";
    case StatusCode::kCancelled: return "CANCELLED";
    case StatusCode::kTimeout: return "TIMEOUT";
    case StatusCode::kStale: return "STALE";
    case StatusCode::kExpired: return "EXPIRED";
    case StatusCode::kMismatch: return "MISMATCH";
    case StatusCode::kCorrupt: return "CORRUPT";
    case StatusCode::kPeerLost: return "PEER_LOST";
    case StatusCode::kUnreachable: return "UNREACHABLE";
    case StatusCode::kClosed: return "CLOSED";
    case StatusCode::kInvalid: return "INVALID";
    case StatusCode::kNoResources: return "NO_RESOURCES";
    case StatusCode::kProtocol: return "PROTOCOL";
    case StatusCode::kWithdrawn: return "WITHDRAWN";
    case StatusCode::kBusy: return "BUSY";
  }
  return "UNKNOWN";
}

}  // namespace kvxfer
