#pragma once

#include <span>

#include "worker/requests/request.h"
#include "worker/slabs/channel_slabs.h"

namespace bulkhead::worker {

/// Checks an infer message against the model and its channel, and fills `request`. The caller sets `requester`, `slabs`
/// and `channel`. The message's tensors move into the request.
///
/// `in_flight` are the channel's other requests. Two tensors, of one request or of two, may be the very same lease; a
/// lease that overlaps another in any other way means that the client gave bytes away twice.
///
/// `generate` is the method of a generating model, null for any other. Its requests get `Request::generate`, and have
/// no deadline but their own.
///
/// Errors  method_unknown naming the known ones, input_invalid, dtype_unsupported, shape_mismatch;
///         protocol_violation: a lease out of bounds, not in an input slab, or overlapping
[[nodiscard]] Result<> admit(channel::Infer& message, const Model& model, const generation::Method* generate,
                             std::chrono::milliseconds request_deadline, const ChannelSlabs& slabs,
                             std::span<const Request* const> in_flight, Request& request);

}  // namespace bulkhead::worker
