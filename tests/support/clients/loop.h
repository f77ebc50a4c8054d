#pragma once

#include <optional>

#include <boost/asio/io_context.hpp>
#include <gtest/gtest.h>

#include "bulkhead/async_channel.h"
#include "tests/support/clients/fake_daemon.h"
#include "tests/support/clients/fake_worker.h"

namespace bulkhead::test {

/// A loop, and one operation after the other on it.
struct Loop {
    boost::asio::io_context context;

    template <typename T>
    Result<T> until(std::optional<Result<T>>& outcome) {
        const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds{20};
        context.restart();
        while (!outcome && context.run_one_until(deadline) > 0) {
        }
        EXPECT_TRUE(outcome) << "the loop ran dry, or the operation took 20 s";
        return outcome ? std::move(*outcome) : Result<T>{Error{}};
    }
    /// `start` is given the operation's completion handler.
    template <typename T>
    Result<T> run(const auto& start) {
        std::optional<Result<T>> outcome;
        start([&](Result<T> completed) { outcome = std::move(completed); });
        return until(outcome);
    }
    Result<AsyncChannel> adopt(UniqueFd socket, const ChannelOptions& options) {
        return run<AsyncChannel>([&](auto handler) {
            AsyncChannel::async_adopt(context.get_executor(), std::move(socket), options, std::move(handler));
        });
    }
    Result<AsyncChannel> adopt(FakeWorker& worker,
                               const ChannelOptions& options = {.client = "test", .deadline = std::chrono::seconds{10}}) {
        return adopt(worker.client_end(), options);
    }
    Result<AsyncChannel> open(const AsyncControl& control, std::string model = "fake",
                              const ChannelOptions& options = {.client = "test", .deadline = {}}) {
        return run<AsyncChannel>([&](auto handler) {
            AsyncChannel::async_open(control, std::move(model), options, std::move(handler));
        });
    }
    Result<Input> allocate(AsyncChannel& channel, wire::DType dtype, std::vector<std::int64_t> dims) {
        return run<Input>([&](auto handler) { channel.async_allocate(dtype, std::move(dims), std::move(handler)); });
    }
    Result<Input> allocate_on_gpu(AsyncChannel& channel, wire::DType dtype, std::vector<std::int64_t> dims) {
        return run<Input>(
            [&](auto handler) { channel.async_allocate_on_gpu(dtype, std::move(dims), std::move(handler)); });
    }
    Result<> keep_outputs_on_gpu(AsyncChannel& channel, std::uint64_t size_bytes) {
        return run<void>([&](auto handler) { channel.async_keep_outputs_on_gpu(size_bytes, std::move(handler)); });
    }
    Input filled(AsyncChannel& channel, std::array<float, 3> values) {
        Input input = allocate(channel, wire::DType::float32, {3}).value();
        std::ranges::copy(values, input.as<float>().begin());
        return input;
    }
    Result<Reply> infer(AsyncChannel& channel, Request request) {
        return run<Reply>([&](auto handler) { channel.async_infer(std::move(request), std::move(handler)); });
    }
    Result<Reply> next(AsyncStream& stream) {
        return run<Reply>([&](auto handler) { stream.async_next(std::move(handler)); });
    }
    Result<> reopen(AsyncChannel& channel) {
        return run<void>([&](auto handler) { channel.async_reopen(std::nullopt, std::move(handler)); });
    }
};

}  // namespace bulkhead::test
