#include "worker/channel/admission.h"

#include <algorithm>

#include <fmt/format.h>
#include <fmt/ranges.h>

namespace bulkhead::worker {
namespace {

/// Most method names that an error lists, to stay readable.
constexpr std::size_t names_shown_max = 16;

Result<const config::MethodSpec*> find_method(const Model& model, const generation::Method* generate,
                                              std::string_view name) {
    if (generate != nullptr && name == generation::method_name) return &generate->spec;
    const std::vector<config::MethodSpec>& methods = model.methods();
    const auto found = std::ranges::find(methods, name, &config::MethodSpec::name);
    if (found != methods.end()) return &*found;
    std::vector<std::string_view> known;
    if (generate != nullptr) known.insert(known.end(), {generation::method_name, generation::adjust_name});
    for (const config::MethodSpec& method : methods)
        if (known.size() < names_shown_max) known.push_back(method.name);
    return Error{ErrorCode::method_unknown, fmt::format("calling method \"{}\"", name),
                 fmt::format("call one of: {}", fmt::join(known, ", "))};
}

/// Whether two leases overlap and are not the same. Ignores lent slabs: nothing writes to them
/// while a result in them is held.
bool collide(const wire::LeaseRef& a, const wire::LeaseRef& b) {
    if (a.slab_id != b.slab_id || a.slab_id >= wire::lent_slab_id_min) return false;
    if (a.offset_bytes == b.offset_bytes && a.size_bytes == b.size_bytes && a.lease_id == b.lease_id) return false;
    return a.offset_bytes < b.offset_bytes + b.size_bytes && b.offset_bytes < a.offset_bytes + a.size_bytes;
}

/// `before`: the tensors of the same request that were checked already.
Result<> check_overlap(const channel::Tensor& tensor, std::span<const channel::Tensor> before,
                       std::span<const PendingRequest* const> in_flight) {
    for (const channel::Tensor& other : before)
        if (collide(tensor.lease, other.lease))
            return Error{
                ErrorCode::protocol_violation,
                fmt::format("tensor \"{}\" overlaps tensor \"{}\" of the same request", tensor.name, other.name),
                "give each tensor bytes of its own, or let two of them name the very same lease"};
    for (const PendingRequest* other : in_flight) {
        // For its client, a request that was answered early is over.
        if (other->answered) continue;
        for (const channel::Tensor& theirs : other->tensors)
            if (collide(tensor.lease, theirs.lease))
                return Error{ErrorCode::protocol_violation,
                             fmt::format("tensor \"{}\" overlaps tensor \"{}\" of request {}, which is in flight",
                                         tensor.name, theirs.name, other->id),
                             "reuse input bytes only after the request that reads them was answered"};
    }
    return {};
}

}  // namespace

Result<> admit(channel::Infer& message, const Model& model, const generation::Method* generate,
               std::chrono::milliseconds request_deadline, const ChannelSlabs& slabs,
               std::span<const PendingRequest* const> in_flight, PendingRequest& request) {
    request.received = Clock::now();
    request.id = message.request_id;
    const bool own_deadline = message.deadline.count() > 0 && message.deadline < request_deadline;
    request.deadline = request.received + (own_deadline ? message.deadline : request_deadline);

    const Result<const config::MethodSpec*> method = find_method(model, generate, message.method);
    if (!method) return method.error();
    request.method = *method;
    const bool generates = generate != nullptr && *method == &generate->spec;
    if (generates)  // its steps have deadlines, the request has none
        request.deadline = message.deadline.count() > 0 ? request.received + message.deadline : never;

    request.tensors = std::move(message.tensors);
    boost::container::small_vector<TensorView, wire::tensors_max> views;
    for (const channel::Tensor& tensor : request.tensors) {
        Result<ChannelSlabs::TensorBytes> given = slabs.input(tensor);
        if (!given) return std::move(given).error().during(fmt::format("tensor \"{}\"", tensor.name));
        if (Result<> disjoint = check_overlap(tensor, {request.tensors.data(), views.size()}, in_flight); !disjoint)
            return disjoint;
        views.push_back(
            {tensor.name, tensor.dtype, {tensor.dims.data(), tensor.dims.size()}, given->bytes, given->on_device});
    }
    if (generates) {
        request.generate = std::make_unique<generation::GenerateParameters>();
        if (Result<> prompt = read_prompt(*generate, views, request.inputs, *request.generate); !prompt) return prompt;
        return read_parameters(generate->shape, message.parameters, *request.generate);
    }
    if (Result<> inputs = check_inputs(**method, views, request.inputs); !inputs) return inputs;
    return check_parameters(**method, message.parameters, request.parameters);
}

}  // namespace bulkhead::worker
