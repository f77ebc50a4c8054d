#include "clients/cpp/channel/reconnecting_channel.h"

#include <algorithm>
#include <atomic>
#include <utility>

#include <fmt/format.h>

#include "clients/cpp/base/limits.h"
#include "clients/cpp/base/protocol_violation.h"
#include "ipc/base/json_codec.h"
#include "ipc/cuda/gpu.h"

namespace bulkhead {
namespace {

using std::chrono::milliseconds;

std::uint64_t next_channel() {
    static std::atomic<std::uint64_t> last = 0;
    return ++last;
}

/// At least 1 ms: zero and negative values have other meanings.
milliseconds left_until(Clock::time_point until) {
    return std::max(std::chrono::ceil<milliseconds>(until - Clock::now()), milliseconds{1});
}

}  // namespace

ReconnectingChannel::ReconnectingChannel() : number_{next_channel()} {}

ReconnectingChannel::ReconnectingChannel(std::filesystem::path socket, std::string model, const ChannelOptions& options)
    : number_{next_channel()}, origin_{Origin{std::move(socket), std::move(model), options}} {}

ReconnectingChannel::Introduction ReconnectingChannel::introduction(std::optional<milliseconds> deadline,
                                                                    int tries) const {
    Introduction asked{{{"model", origin_->model}, {"client", origin_->options.client}}, origin_->options, tries};
    asked.options.deadline.reset();
    if (deadline) asked.until = deadline_in(*deadline);
    limit(asked);
    return asked;
}

void ReconnectingChannel::limit(Introduction& asked) {
    if (!asked.until) return;
    const milliseconds left = left_until(*asked.until);
    asked.params["deadline_ms"] = left.count();
    asked.patience = left + limits::request_grace;  // the daemon's own error tells more than ours
}

Result<UniqueFd> ReconnectingChannel::introduced(Introduction& asked, Result<Answer> answer) {
    if (!answer) return std::move(answer).error();
    if (answer->fds.size() != 1)
        return protocol_violation(
            fmt::format("channel.open {} brought {} descriptors", origin_->model, answer->fds.size()));
    origin_->stateful = json_codec::member<bool>(answer->result.get_object(), "stateful").value_or(true);
    if (asked.until) asked.options.deadline = left_until(*asked.until);
    return std::move(answer->fds.front());
}

/// The daemon may notice a death later than the client, and so introduce the client to
/// a dead worker.
bool ReconnectingChannel::ask_again(Introduction& asked, const Error& failure) {
    if (failure.code != ErrorCode::worker_lost || --asked.tries_left == 0) return false;
    if (asked.until && Clock::now() >= *asked.until) return false;
    limit(asked);
    return true;
}

Result<> ReconnectingChannel::connect(ControlClient& control, Introduction asked) {
    for (;;) {
        Result<UniqueFd> socket = introduced(asked, control.call("channel.open", asked.params, asked.patience));
        if (!socket) return std::move(socket).error();
        Result<std::shared_ptr<WorkerConnection>> connection =
            WorkerConnection::open(std::move(*socket), number_, asked.options);
        if (connection) {
            replace_connection(std::move(*connection));
            return {};
        }
        if (!ask_again(asked, connection.error())) return std::move(connection).error();
    }
}

void ReconnectingChannel::replace_connection(std::shared_ptr<WorkerConnection> connection) {
    const std::shared_ptr<WorkerConnection> dead = std::exchange(connection_, std::move(connection));
    for (auto& [id, flight] : in_flight_)
        if (flight.connection == dead && !flight.lost_with && !flight.cancelled && !origin_->stateful)
            if (auto lost = dead->take_lost(flight.request_id)) send_again(flight, std::move(lost.mapped()));
    if (dead && dead->ended()) dead->let_go();
}

Result<> ReconnectingChannel::reopen(std::optional<milliseconds> deadline) {
    if (!connection_->ended() && !connection_->closing()) return {};
    if (!origin_)
        return Error{ErrorCode::worker_lost,
                     fmt::format("opening a channel to {} again: it came as a descriptor, from where is not known here",
                                 connection_->welcome().model),
                     "open a new channel"};
    Introduction asked = introduction(deadline, limits::reopen_tries);
    Result<ControlClient> control = ControlClient::connect(origin_->socket);
    if (!control) return std::move(control).error();
    return connect(*control, std::move(asked));
}

void ReconnectingChannel::send_again(InFlight& flight, WorkerConnection::Sending request) {
    flight.lost_with = flight.connection->welcome().generation;
    flight.connection = connection_;
    const auto sent = [&]() -> Result<std::uint64_t> {
        if (flight.until && Clock::now() >= *flight.until)
            return Error{ErrorCode::deadline_exceeded, "its deadline passed meanwhile", "allow more time"};
        if (flight.until) request.deadline = left_until(*flight.until);
        for (Tensor& input : request.inputs)
            if (const Result<> placed = place(input, request.stream); !placed)
                return Error{placed.error()}.during(fmt::format("input \"{}\"", input.name));
        return connection_->submit(std::move(request));
    }();
    if (sent)
        flight.request_id = *sent, ++replays_;
    else
        flight.refused = sent.error();
}

/// Makes the tensor readable for the present connection's worker. Copies an input from an earlier
/// worker's slab at each use, because the caller may still write to it.
Result<> ReconnectingChannel::place(Tensor& tensor, void* stream) {
    if (tensor.forwarded) return forward(tensor, stream);
    if (connection_->owns(*tensor.lease)) return {};
    if (tensor.lease->slab->memory().gpu)
        return Error{ErrorCode::input_invalid, "an input that lies in the GPU memory of a worker that has ended",
                     "allocate it again: only the GPU could copy it"};
    return copy(tensor, tensor.lease->dtype, tensor.lease->dims, tensor.lease->bytes());
}

Result<> ReconnectingChannel::copy(Tensor& tensor, wire::DType dtype, std::span<const std::int64_t> dims,
                                   std::span<const std::byte> bytes) {
    Result<std::shared_ptr<Input::Lease>> room = connection_->allocate(dtype, dims);
    if (!room) return std::move(room).error();
    std::ranges::copy(bytes, (*room)->bytes().begin());
    tensor.lease = std::move(*room);
    return {};
}

/// Forwards an output in place, as a loan. Forwards a copy if the worker takes no loans or has no
/// room for one more, and always for a GPU output.
Result<> ReconnectingChannel::forward(Tensor& tensor, void* stream) {
    Output::Lease& output = *tensor.forwarded;
    tensor.lease.reset();
    tensor.loan.reset();
    if (output.slab->memory().gpu) {
        Result<std::shared_ptr<const Input::Lease>> on_gpu = connection_->copy_on_gpu(output, stream);
        if (!on_gpu) return std::move(on_gpu).error();
        tensor.lease = std::move(*on_gpu);
        tensor.forwarded.reset();
        return {};
    }
    if (connection_->lends()) {
        Result<std::shared_ptr<const Loan>> loan = connection_->borrow(output.slab);
        if (loan) {
            tensor.loan = std::move(*loan);
            return {};
        }
        if (loan.error().code != ErrorCode::resources_exhausted) return std::move(loan).error();
    }
    // Keeps the output: if the request is sent again, the next worker may take loans.
    return copy(tensor, output.tensor.dtype, output.tensor.dims, output.bytes());
}

Result<std::uint64_t> ReconnectingChannel::submit_now(const Request& request, Clock::time_point asked, bool awaited) {
    // Before any copy.
    if (std::optional<Error> why = connection_->why_not_now()) return *std::move(why);
    WorkerConnection::Sending sending{std::string{request.method},
                                      {},
                                      request.parameters,
                                      request.deadline,
                                      request.retry_safe,
                                      request.in_parts,
                                      request.stream,
                                      awaited};
    bool copied = false;
    // Its GPU copies may still be queued, into room that is free for others from now on.
    const auto not_sent = [&](Error reason) {
        if (copied) connection_->gpu()->synchronize();
        return reason;
    };
    for (const NamedInput& named : request.inputs) {
        const bool is_own = named.input != nullptr && named.input->lease_ && owns(*named.input->lease_);
        const bool is_output = named.output != nullptr && named.output->lease_;
        if (!is_own && !is_output)
            return not_sent({ErrorCode::input_invalid,
                             fmt::format("input \"{}\" was not allocated on this channel", named.name),
                             "allocate inputs on the channel they are sent on, or forward an output"});
        Tensor& tensor = sending.inputs.emplace_back(Tensor{
            std::string{named.name}, is_own ? named.input->lease_ : nullptr, is_own ? nullptr : named.output->lease_});
        if (const Result<> placed = place(tensor, request.stream); !placed)
            return not_sent(Error{placed.error()}.during(fmt::format("input \"{}\"", named.name)));
        copied = copied || (is_output && tensor.lease && tensor.lease->slab->memory().gpu);
    }
    InFlight flight{connection_};
    if (request.deadline.count() > 0) {
        flight.until = asked + request.deadline;
        sending.deadline = left_until(*flight.until);
    }
    const Result<std::uint64_t> sent = connection_->submit(std::move(sending));
    if (!sent) return not_sent(sent.error());
    flight.request_id = *sent;
    in_flight_.emplace(++last_request_id_, std::move(flight));
    return last_request_id_;
}

Result<std::uint64_t> ReconnectingChannel::submit(const Request& request, bool awaited) {
    const Clock::time_point asked = Clock::now();
    Result<std::uint64_t> sent = submit_now(request, asked, awaited);
    if (sent || !may_retry(request, sent.error())) return sent;
    std::optional<milliseconds> left;
    if (request.deadline.count() > 0) left = left_until(asked + request.deadline);
    if (const Result<> reopened = reopen(left); !reopened) return not_reopened(reopened.error());
    return submit_now(request, asked, awaited);
}

bool ReconnectingChannel::may_retry(const Request& request, const Error& refusal) const noexcept {
    return refusal.code == ErrorCode::worker_lost && request.retry_safe && can_reopen();
}

Error ReconnectingChannel::not_reopened(const Error& reason) const {
    return Error{reason}.during(
        fmt::format("sending a request to {}: generation {} has died, and opening the channel again",
                    connection_->welcome().model, connection_->welcome().generation));
}

Result<Reply> ReconnectingChannel::take(std::uint64_t request_id, bool in_parts) {
    const auto found = in_flight_.find(request_id);
    if (found == in_flight_.end())
        return Error{ErrorCode::input_invalid, fmt::format("request {} is not in flight", request_id),
                     "wait once for each request that was submitted"};
    Result<Reply> outcome = outcome_of(found->second, in_parts);
    if (is_lost(found->second)) {
        const Error loss = outcome.error();
        std::optional<milliseconds> left;
        if (found->second.until) left = left_until(*found->second.until);
        if (const Result<> reopened = reopen(left); !reopened)
            outcome = not_sent_again(loss, reopened.error());
        else
            outcome = outcome_of(found->second, in_parts);
    }
    if (outcome && outcome->more) return outcome;
    return completed(found, std::move(outcome));
}

Result<Reply> ReconnectingChannel::take_now(std::uint64_t request_id, bool in_parts) {
    const auto found = in_flight_.find(request_id);
    Result<Reply> outcome = outcome_of(found->second, in_parts, Clock::now());
    if (outcome && outcome->more) return outcome;
    return completed(found, std::move(outcome));
}

ReconnectingChannel::RequestState ReconnectingChannel::state_of(std::uint64_t request_id) const {
    const auto found = in_flight_.find(request_id);
    if (found == in_flight_.end() || found->second.refused) return RequestState::answered;
    if (is_lost(found->second)) return RequestState::lost;
    return found->second.connection->answered(found->second.request_id) ? RequestState::answered
                                                                        : RequestState::in_flight;
}

Result<Reply> ReconnectingChannel::give_up(std::uint64_t request_id, const Error& reason) {
    const auto found = in_flight_.find(request_id);
    const Result<Reply> outcome = outcome_of(found->second);
    return completed(found, not_sent_again(outcome.error(), reason));
}

Error ReconnectingChannel::not_sent_again(const Error& loss, const Error& reason) {
    return Error{reason}.during(fmt::format("{}; sending it once more", loss.attempt));
}

Result<Reply> ReconnectingChannel::completed(Requests::iterator found, Result<Reply> outcome) {
    const std::uint64_t request_id = found->first;
    const InFlight flight = std::move(in_flight_.extract(found).mapped());
    if (outcome || !flight.lost_with) return outcome;
    return std::move(outcome).error().during(
        fmt::format("request {} of {}, lost with generation {} and sent once more to generation {}", request_id,
                    flight.connection->welcome().model, *flight.lost_with, flight.connection->welcome().generation));
}

Result<Reply> ReconnectingChannel::outcome_of(InFlight& flight, bool in_parts, Clock::time_point until) {
    if (flight.refused) return *flight.refused;
    return flight.connection->wait(flight.request_id, in_parts, until);
}

/// Whether the request died with its worker and may be sent once more.
bool ReconnectingChannel::is_lost(const InFlight& flight) const {
    return flight.connection == connection_ && !flight.lost_with && !flight.cancelled && can_reopen() &&
           connection_->has_lost(flight.request_id);
}

Result<Input> ReconnectingChannel::allocate(wire::DType dtype, std::span<const std::int64_t> dims, bool on_gpu) {
    Result<std::shared_ptr<Input::Lease>> lease = connection_->allocate(dtype, dims, on_gpu);
    if (!lease) return std::move(lease).error();
    return Input{std::move(*lease)};
}

std::optional<Result<Input>> ReconnectingChannel::allocate_or_ask(wire::DType dtype, std::span<const std::int64_t> dims,
                                                                  bool on_gpu, bool& asked) {
    Result<std::shared_ptr<Input::Lease>> lease = connection_->allocate_or_ask(dtype, dims, on_gpu, asked);
    if (!lease) return std::move(lease).error();
    if (*lease == nullptr) return std::nullopt;
    return Input{std::move(*lease)};
}

Result<> ReconnectingChannel::cancel(std::uint64_t request_id) {
    const auto found = in_flight_.find(request_id);
    if (found == in_flight_.end()) return {};
    found->second.cancelled = true;
    if (found->second.refused) return {};
    return found->second.connection->cancel(found->second.request_id);
}

void ReconnectingChannel::abandon(std::uint64_t request_id) {
    const auto found = in_flight_.extract(request_id);
    if (!found.empty() && !found.mapped().refused) found.mapped().connection->abandon(found.mapped().request_id);
}

}  // namespace bulkhead
