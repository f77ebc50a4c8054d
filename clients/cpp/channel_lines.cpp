#include "clients/cpp/channel_lines.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <utility>

#include <fmt/format.h>

#include "clients/cpp/limits.h"

namespace bulkhead {
namespace {

using std::chrono::milliseconds;

std::uint64_t next_channel() {
    static std::atomic<std::uint64_t> last = 0;
    return ++last;
}

/// Never zero or less, which would mean something else.
milliseconds left_until(Clock::time_point until) {
    return std::max(std::chrono::ceil<milliseconds>(until - Clock::now()), milliseconds{1});
}

}  // namespace

ChannelLines::ChannelLines() : channel_{next_channel()} {}

Result<std::unique_ptr<ChannelLines>> ChannelLines::open(ControlClient& control, std::string_view model,
                                                         const ChannelOptions& options) {
    std::unique_ptr<ChannelLines> lines{new ChannelLines};
    lines->origin_ = Origin{control.path(), std::string{model}, options};
    Result<std::shared_ptr<ChannelState>> line = lines->introduce(control, options.deadline);
    if (!line) return std::move(line).error();
    lines->line_ = std::move(*line);
    return lines;
}

Result<std::unique_ptr<ChannelLines>> ChannelLines::adopt(UniqueFd socket, const ChannelOptions& options) {
    std::unique_ptr<ChannelLines> lines{new ChannelLines};
    Result<std::shared_ptr<ChannelState>> line = ChannelState::open(std::move(socket), lines->channel_, options);
    if (!line) return std::move(line).error();
    lines->line_ = std::move(*line);
    return lines;
}

Result<std::shared_ptr<ChannelState>> ChannelLines::introduce(ControlClient& control,
                                                              std::optional<milliseconds> deadline) {
    boost::json::object params{{"model", origin_->model}, {"client", origin_->options.client}};
    ChannelOptions options = origin_->options;
    options.deadline.reset();
    std::optional<milliseconds> patience;
    const Clock::time_point until = deadline_in(deadline.value_or(limits::call));
    if (deadline) {
        params["deadline_ms"] = deadline->count();
        patience = *deadline + limits::request_grace;  // the daemon's own error says more than ours
    }
    Result<Answer> answer = control.call("channel.open", std::move(params), patience);
    if (!answer) return std::move(answer).error();
    if (answer->fds.size() != 1)
        return Error{ErrorCode::protocol_violation,
                     fmt::format("channel.open {} brought {} descriptors", origin_->model, answer->fds.size()),
                     "use a client and a daemon of matching releases"};
    const boost::json::value* stateful = answer->result.get_object().if_contains("stateful");
    origin_->stateful = stateful == nullptr || !stateful->is_bool() || stateful->get_bool();
    if (deadline) options.deadline = left_until(until);
    return ChannelState::open(std::move(answer->fds.front()), channel_, options);
}

Result<> ChannelLines::reopen(std::optional<milliseconds> deadline) {
    if (!line_->ended() && !line_->closing()) return {};
    if (!origin_)
        return Error{ErrorCode::worker_lost,
                     fmt::format("opening a channel to {} again: it came as a descriptor, from where is not known here",
                                 line_->welcome().model),
                     "open a new channel"};
    const Clock::time_point until = deadline_in(deadline.value_or(limits::call));
    Result<ControlClient> control = ControlClient::connect(origin_->socket);
    if (!control) return std::move(control).error();
    for (int tried = 1;; ++tried) {
        std::optional<milliseconds> left = deadline;
        if (deadline) left = left_until(until);
        Result<std::shared_ptr<ChannelState>> line = introduce(*control, left);
        if (line) {
            const std::shared_ptr<ChannelState> dead = std::exchange(line_, std::move(*line));
            for (auto& [id, flight] : flights_)
                if (flight.line == dead && !flight.lost_with && !flight.cancelled && !origin_->stateful)
                    if (auto request = dead->take_lost(flight.request_id)) send_again(flight, std::move(*request));
            return {};
        }
        // The daemon may know of a death later than the client, and so introduce it to a dead worker.
        if (line.error().code != ErrorCode::worker_lost || tried == limits::reopen_tries || Clock::now() >= until)
            return std::move(line).error();
    }
}

void ChannelLines::send_again(Flight& flight, ChannelState::Sending request) {
    flight.lost_with = flight.line->welcome().generation;
    flight.line = line_;
    const auto sent = [&]() -> Result<std::uint64_t> {
        if (flight.until && Clock::now() >= *flight.until)
            return Error{ErrorCode::deadline_exceeded, "its deadline passed meanwhile", "allow more time"};
        if (flight.until) request.deadline = left_until(*flight.until);
        for (auto& input : request.inputs) {
            Result<std::shared_ptr<const Input::Lease>> here = placed(std::move(input.lease));
            if (!here) return Error{here.error()}.during(fmt::format("input \"{}\"", input.name));
            input.lease = std::move(*here);
        }
        return line_->submit(std::move(request));
    }();
    if (sent)
        flight.request_id = *sent, ++replays_;
    else
        flight.refused = sent.error();
}

/// The same bytes in a slab of the line in use. What a former worker of this channel had is copied, at each use:
/// whoever holds the input may be writing to the old place still.
Result<std::shared_ptr<const Input::Lease>> ChannelLines::placed(std::shared_ptr<const Input::Lease> lease) {
    if (line_->owns(*lease)) return lease;
    Result<std::shared_ptr<Input::Lease>> copy = line_->allocate(lease->dtype, lease->dims);
    if (!copy) return std::move(copy).error();
    const auto bytes = [](const Input::Lease& at) {
        return at.slab->memory.bytes().subspan(at.block.offset_bytes, at.block.size_bytes);
    };
    std::ranges::copy(bytes(*lease), bytes(**copy).begin());
    return std::move(*copy);
}

Result<std::uint64_t> ChannelLines::send(const Request& request) {
    ChannelState::Sending sending{
        std::string{request.method}, {}, request.parameters, request.deadline, request.retry_safe};
    for (const NamedInput& named : request.inputs) {
        if (named.input == nullptr || !named.input->lease_ || named.input->lease_->slab->channel != channel_)
            return Error{ErrorCode::input_invalid,
                         fmt::format("input \"{}\" was not allocated on this channel", named.name),
                         "allocate inputs on the channel they are sent on"};
        Result<std::shared_ptr<const Input::Lease>> here = placed(named.input->lease_);
        if (!here) return Error{here.error()}.during(fmt::format("input \"{}\"", named.name));
        sending.inputs.push_back({std::string{named.name}, std::move(*here)});
    }
    return line_->submit(std::move(sending));
}

Result<std::uint64_t> ChannelLines::submit(const Request& request) {
    Flight flight{line_, 0, {}, false, {}, {}};
    if (request.deadline.count() > 0) flight.until = deadline_in(request.deadline);
    Result<std::uint64_t> sent = send(request);
    if (!sent && sent.error().code == ErrorCode::worker_lost && request.retry_safe && can_reopen()) {
        std::optional<milliseconds> left;
        if (flight.until) left = left_until(*flight.until);
        if (const Result<> reopened = reopen(left); !reopened)
            return Error{reopened.error()}.during(
                fmt::format("sending a request to {}: generation {} has died, and opening the channel again",
                            line_->welcome().model, line_->welcome().generation));
        sent = send(request);
    }
    if (!sent) return sent.error();
    flight.line = line_;
    flight.request_id = *sent;
    flights_.emplace(++last_request_id_, std::move(flight));
    return last_request_id_;
}

Result<Reply> ChannelLines::wait(std::uint64_t request_id) {
    const auto found = flights_.find(request_id);
    if (found == flights_.end())
        return Error{ErrorCode::input_invalid, fmt::format("request {} is not in flight", request_id),
                     "wait once for each request that was submitted"};
    Result<Reply> outcome = outcome_of(found->second);
    if (is_lost(found->second)) {
        const Error loss = outcome.error();
        std::optional<milliseconds> left;
        if (found->second.until) left = left_until(*found->second.until);
        if (const Result<> reopened = reopen(left); !reopened)
            outcome = Error{reopened.error()}.during(fmt::format("{}; sending it once more", loss.attempt));
        else
            outcome = outcome_of(found->second);
    }
    const Flight flight = std::move(flights_.extract(found).mapped());
    if (outcome || !flight.lost_with) return outcome;
    return std::move(outcome).error().during(
        fmt::format("request {} of {}, lost with generation {} and sent once more to generation {}", request_id,
                    flight.line->welcome().model, *flight.lost_with, flight.line->welcome().generation));
}

Result<Reply> ChannelLines::outcome_of(Flight& flight) {
    if (flight.refused) return *flight.refused;
    return flight.line->wait(flight.request_id);
}

/// It died with its worker, and may be sent once more.
bool ChannelLines::is_lost(const Flight& flight) const {
    return flight.line == line_ && !flight.lost_with && !flight.cancelled && can_reopen() &&
           line_->has_lost(flight.request_id);
}

Result<> ChannelLines::cancel(std::uint64_t request_id) {
    const auto found = flights_.find(request_id);
    if (found == flights_.end()) return {};
    found->second.cancelled = true;
    if (found->second.refused) return {};
    return found->second.line->cancel(found->second.request_id);
}

}  // namespace bulkhead
