// Several requests at a time, on one thread.
//   async_infer MODEL INPUT COUNT DIM…

#include <algorithm>
#include <array>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include <boost/asio/co_spawn.hpp>
#include <boost/asio/io_context.hpp>
#include <boost/asio/use_awaitable.hpp>
#include <boost/asio/use_future.hpp>

#include <bulkhead/async_channel.h>

namespace asio = boost::asio;
using asio::use_awaitable;

asio::awaitable<void> run(std::string model, std::string name, int count, std::vector<std::int64_t> dims) {
    bulkhead::AsyncControl control{co_await asio::this_coro::executor};
    bulkhead::ChannelOptions options;
    auto opened = co_await bulkhead::AsyncChannel::async_open(control, model, options, use_awaitable);
    bulkhead::AsyncChannel channel = std::move(opened).value();
    auto allocated = co_await channel.async_allocate(bulkhead::wire::DType::float32, dims, use_awaitable);
    bulkhead::Input x = std::move(allocated).value();
    std::ranges::fill(x.as<float>(), 1.0f);
    const std::array<bulkhead::NamedInput, 1> inputs{{{name, &x}}};

    int answered = 0;
    for (int i = 1; i < count; ++i)
        channel.async_infer({.inputs = inputs, .retry_safe = true},
                            [&](bulkhead::Result<bulkhead::Reply> reply) { answered += reply.has_value(); });
    const auto last = co_await channel.async_infer({.inputs = inputs, .retry_safe = true}, use_awaitable);
    answered += last.has_value();
    // Answers arrive in the worker's order.
    while (answered < count) co_await asio::post(use_awaitable);
    std::printf("%d of %d answered\n", answered, count);
}

int main(int argc, char** argv) {
    if (argc < 5) return std::fputs("usage: async_infer MODEL INPUT COUNT DIM...\n", stderr), 2;
    std::vector<std::int64_t> dims;
    for (int i = 4; i < argc; ++i) dims.push_back(std::atoll(argv[i]));
    asio::io_context loop;
    auto done = asio::co_spawn(loop, run(argv[1], argv[2], std::atoi(argv[3]), dims), asio::use_future);
    loop.run();
    try {
        done.get();
    } catch (const std::exception& error) {
        std::fprintf(stderr, "%s\n", error.what());
        return 1;
    }
}
