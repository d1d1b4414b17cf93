#ifndef KVXFER_TRANSPORT_VERBS_NEAREST_H_
#define KVXFER_TRANSPORT_VERBS_NEAREST_H_

#include <optional>

#include "kvxfer/verbs.h"
#include "transport/verbs/affinity.h"
#include "transport/verbs/rail.h"

namespace kvxfer::ibv {

// What `options` ask rails to be near to by name, if anything. Throws Error(kInvalid) where there
// is no such thing.
std::optional<Place> named_place(const VerbsOptions& options);

// Leaves the rails that are nearest to a place or, without one, to the GPUs that `options` list;
// and the adapters that those need. Says in `all.nearness` what was chosen, or why nothing was.
void keep_nearest(Rails& all, const std::optional<Place>& place, const VerbsOptions& options);

// Leaves so many rails, and the adapters that those need.
void keep_first(Rails& all, size_t most);

}  // namespace kvxfer::ibv

#endif  // KVXFER_TRANSPORT_VERBS_NEAREST_H_
