#pragma once

#include <deque>
#include <filesystem>
#include <map>
#include <memory>
#include <string>
#include <type_traits>
#include <vector>

#include <boost/asio/bind_cancellation_slot.hpp>
#include <boost/asio/cancellation_signal.hpp>
#include <gtest/gtest.h>

#include "bulkhead/async_dlpack.h"
#include "bulkhead/channel.h"
#include "tests/support/clients/channel_calls.h"
#include "tests/support/clients/introducing.h"
#include "tests/support/clients/loop.h"

namespace bulkhead::test {

/// An `AsyncChannel` with the calls of a `Channel`, each of which runs the loop until it is done.
class SteppedChannel {
public:
    static Result<SteppedChannel> adopt(UniqueFd socket, const ChannelOptions& options) {
        SteppedChannel made;
        return made.with(made.loop_->adopt(std::move(socket), options));
    }
    static Result<SteppedChannel> open(const std::filesystem::path& socket, std::string model,
                                       const ChannelOptions& options) {
        SteppedChannel made;
        made.control_ = std::make_unique<AsyncControl>(made.loop_->context.get_executor(), socket);
        return made.with(made.loop_->open(*made.control_, std::move(model), options));
    }

    friend Result<ImportedInput> from_dlpack(SteppedChannel& channel, DLPackTensor tensor, void* stream) {
        return channel.loop_->run<ImportedInput>([&](auto handler) {
            async_from_dlpack(channel.channel_, std::move(tensor), stream, std::move(handler));
        });
    }

    [[nodiscard]] std::string_view model() const { return channel_.model(); }
    [[nodiscard]] std::uint64_t generation() const { return channel_.generation(); }
    [[nodiscard]] std::uint64_t replays() const { return channel_.replays(); }
    [[nodiscard]] const boost::json::object& methods() const { return channel_.methods(); }
    [[nodiscard]] Result<> reopen() { return loop_->reopen(channel_); }
    Result<Input> allocate(wire::DType dtype, std::span<const std::int64_t> dims) {
        return loop_->allocate(channel_, dtype, {dims.begin(), dims.end()});
    }

    Result<Input> allocate_on_gpu(wire::DType dtype, std::span<const std::int64_t> dims) {
        return loop_->allocate_on_gpu(channel_, dtype, {dims.begin(), dims.end()});
    }
    Result<> keep_outputs_on_gpu(std::uint64_t size_bytes) { return loop_->keep_outputs_on_gpu(channel_, size_bytes); }
    [[nodiscard]] std::optional<Error> why_no_gpu() const { return channel_.why_no_gpu(); }

    /// The handler of a request that the channel refuses runs right behind the channel's own.
    Result<std::uint64_t> submit(const Request& request) {
        turn();
        const std::uint64_t id = ++last_id_;
        // What the request points to must stay until it is answered.
        auto kept = std::make_shared<Kept>();
        for (const NamedInput& named : request.inputs) {
            if (named.input != nullptr) kept->inputs.push_back(named.input->share());
            kept->named.push_back(named.input != nullptr ? NamedInput{named.name, &kept->inputs.back()} : named);
        }
        Request with = request;
        with.inputs = kept->named;
        if (request.in_parts) {
            streams_.emplace(id, Stream{channel_.stream(std::move(with)), kept});
            return id;
        }
        Pending& pending = pending_[id];
        channel_.async_infer(std::move(with), boost::asio::bind_cancellation_slot(
                                                  pending.cancel->slot(),
                                                  [kept, outcome = pending.outcome](Result<Reply> reply) mutable {
                                                      kept.reset();
                                                      *outcome = std::move(reply);
                                                  }));
        loop_->context.restart();
        for (int handler = 0; handler < 2; ++handler) loop_->context.poll_one();
        if (!*pending.outcome || **pending.outcome) return id;
        const Error refused = (*pending.outcome)->error();
        pending_.erase(id);
        return refused;
    }
    Result<Reply> wait(std::uint64_t id) {
        auto pending = pending_.extract(id);
        if (pending.empty()) return Error{ErrorCode::input_invalid, "not in flight", {}};
        return loop_->until(*pending.mapped().outcome);
    }
    Result<Reply> infer(Request request) {
        request.in_parts = false;
        const Result<std::uint64_t> id = submit(request);
        if (!id) return id.error();
        return wait(*id);
    }
    Result<Reply> next(std::uint64_t id) {
        const auto stream = streams_.find(id);
        if (stream == streams_.end()) return Error{ErrorCode::input_invalid, "not in flight", {}};
        return loop_->next(stream->second.parts);
    }
    void abandon(std::uint64_t id) {
        streams_.erase(id);
        turn();
    }
    Result<> cancel(std::uint64_t id) {
        if (const auto pending = pending_.find(id); pending != pending_.end())
            pending->second.cancel->emit(boost::asio::cancellation_type::terminal);
        turn();
        return {};
    }

private:
    struct Kept {
        std::deque<Input> inputs;
        std::vector<NamedInput> named;
    };
    struct Stream {
        AsyncStream parts;
        std::shared_ptr<Kept> kept;
    };
    struct Pending {
        std::unique_ptr<boost::asio::cancellation_signal> cancel = std::make_unique<boost::asio::cancellation_signal>();
        std::shared_ptr<std::optional<Result<Reply>>> outcome = std::make_shared<std::optional<Result<Reply>>>();
    };

    SteppedChannel() = default;
    Result<SteppedChannel> with(Result<AsyncChannel> opened) {
        if (!opened) return std::move(opened).error();
        channel_ = std::move(*opened);
        return std::move(*this);
    }
    void turn() {
        loop_->context.restart();
        loop_->context.poll();
    }

    std::unique_ptr<Loop> loop_ = std::make_unique<Loop>();
    std::unique_ptr<AsyncControl> control_;
    std::map<std::uint64_t, Pending> pending_;
    AsyncChannel channel_;
    std::map<std::uint64_t, Stream> streams_;
    std::uint64_t last_id_ = 0;
};

template <typename C>
C opened(const std::filesystem::path& socket, const std::string& model, const ChannelOptions& options) {
    if constexpr (std::is_same_v<C, Channel>) {
        // The channel asks for the next one by itself.
        ControlClient control = ControlClient::connect(socket).value();
        return Channel::open(control, model, options).value();
    } else {
        return SteppedChannel::open(socket, model, options).value();
    }
}
template <typename C>
C opened(FakeDaemon& daemon) {
    return opened<C>(daemon.path(), "fake", {.client = "test", .deadline = {}});
}

/// What both clients promise: TYPED_TEST_SUITE(Suite, BothClients, ClientNames).
using BothClients = testing::Types<Channel, SteppedChannel>;
struct ClientNames {
    template <typename C>
    static std::string GetName(int) {
        return std::is_same_v<C, Channel> ? "Blocking" : "Async";
    }
};

}  // namespace bulkhead::test
