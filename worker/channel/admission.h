#pragma once

#include <span>

#include "worker/requests/request.h"
#include "worker/slabs/channel_slabs.h"

namespace bulkhead::worker {

/// Checks an infer message against the model and its channel, and fills `request` with the
/// message's tensors. The caller sets `requester`, `slabs` and `channel`.
///
/// `in_flight`: the channel's other requests. Two tensors, of one request or of two, may share the
/// same lease. Leases that overlap in any other way mean that the client allocated bytes twice.
///
/// `generate`: the method of a generating model; null for any other. Its requests get
/// `PendingRequest::generate` and only their own deadline.
///
/// Errors  method_unknown naming the known ones, input_invalid, dtype_unsupported, shape_mismatch;
///         protocol_violation: a lease out of bounds, not in an input slab, or overlapping
[[nodiscard]] Result<> admit(channel::Infer& message, const Model& model, const generation::Method* generate,
                             std::chrono::milliseconds request_deadline, const ChannelSlabs& slabs,
                             std::span<const PendingRequest* const> in_flight, PendingRequest& request);

}  // namespace bulkhead::worker
