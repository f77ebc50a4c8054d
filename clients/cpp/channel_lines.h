#pragma once

#include <filesystem>
#include <map>
#include <memory>
#include <optional>
#include <string>

#include "clients/cpp/channel.h"
#include "clients/cpp/channel_state.h"
#include "clients/cpp/wait_ready.h"

namespace bulkhead {

/// What outlives a worker in a channel: where to ask for its successor, which requests may be sent once more, and the
/// lines of dead workers for as long as somebody waits on them. A line is `ChannelState`, one worker's end to end.
class ChannelLines {
public:
    static Result<std::unique_ptr<ChannelLines>> open(ControlClient& control, std::string_view model,
                                                      const ChannelOptions& options);
    static Result<std::unique_ptr<ChannelLines>> adopt(UniqueFd socket, const ChannelOptions& options);

    [[nodiscard]] ChannelState& line() const noexcept { return *line_; }
    [[nodiscard]] std::uint64_t replays() const noexcept { return replays_; }

    Result<std::uint64_t> submit(const Request& request);
    Result<Reply> wait(std::uint64_t request_id);
    Result<> cancel(std::uint64_t request_id);
    /// Nothing to do while the worker serves.
    Result<> reopen(std::optional<std::chrono::milliseconds> deadline);

private:
    /// Whom to ask for a new line; nobody where a socket was adopted.
    struct Origin {
        std::filesystem::path socket;
        std::string model;
        ChannelOptions options;
        bool stateful = true;  ///< until a daemon said otherwise: such a request means something only where it was sent
    };
    struct Flight {
        std::shared_ptr<ChannelState> line;
        std::uint64_t request_id;                ///< on that line
        std::optional<Clock::time_point> until;  ///< the deadline that the caller named
        bool cancelled = false;                  ///< never sent again
        std::optional<std::uint64_t> lost_with;  ///< the generation that died with it; then it was sent once more
        std::optional<Error> refused;            ///< why it could not be
    };

    ChannelLines();
    Result<std::shared_ptr<ChannelState>> introduce(ControlClient& control,
                                                    std::optional<std::chrono::milliseconds> deadline);
    /// By itself, for a request that may be sent again.
    [[nodiscard]] bool can_reopen() const noexcept { return origin_ && !origin_->stateful && line_->died(); }
    [[nodiscard]] bool is_lost(const Flight& flight) const;
    static Result<Reply> outcome_of(Flight& flight);
    void send_again(Flight& flight, ChannelState::Sending request);
    Result<std::uint64_t> send(const Request& request);
    Result<std::shared_ptr<const Input::Lease>> placed(std::shared_ptr<const Input::Lease> lease);

    std::uint64_t channel_;  ///< of the slabs that are ours
    std::optional<Origin> origin_;
    std::shared_ptr<ChannelState> line_;
    std::map<std::uint64_t, Flight> flights_;  ///< by the number that the caller has
    std::uint64_t last_request_id_ = 0;
    std::uint64_t replays_ = 0;
};

}  // namespace bulkhead
