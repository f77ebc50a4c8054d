// Clients that do nothing for a while: what others need of a worker is not theirs to keep.

#include <array>
#include <functional>
#include <list>
#include <thread>
#include <vector>

#include <boost/asio/co_spawn.hpp>
#include <boost/asio/executor_work_guard.hpp>
#include <boost/asio/io_context.hpp>
#include <boost/asio/use_awaitable.hpp>
#include <boost/asio/use_future.hpp>
#include <gtest/gtest.h>

#include "bulkhead/async_channel.h"
#include "tests/support/daemon/daemon.h"
#include "tests/support/daemon/fleets.h"

namespace bulkhead::test {
namespace {

namespace asio = boost::asio;
using asio::use_awaitable;
using namespace std::chrono_literals;

/// A program with an Asio loop that runs all the while.
class AsioClient {
public:
    explicit AsioClient(const std::filesystem::path& socket) : control_{loop_.get_executor(), socket} {}
    ~AsioClient() {
        run([this]() -> asio::awaitable<void> {
            channels_.clear();
            co_return;
        });
        work_.reset();
        thread_.join();
    }
    AsioClient(const AsioClient&) = delete;
    AsioClient& operator=(const AsioClient&) = delete;

    void run(std::function<asio::awaitable<void>()> operation) {
        asio::co_spawn(loop_, std::move(operation), asio::use_future).get();
    }
    /// On the loop.
    asio::awaitable<AsyncChannel*> open(std::string model) {
        ChannelOptions options;
        options.slab_idle = 100ms;
        Result<AsyncChannel> opened =
            co_await AsyncChannel::async_open(control_, std::move(model), std::move(options), use_awaitable);
        channels_.push_back(std::move(opened).value());
        co_return &channels_.back();
    }

private:
    asio::io_context loop_;
    asio::executor_work_guard<asio::io_context::executor_type> work_{loop_.get_executor()};
    AsyncControl control_;
    std::list<AsyncChannel> channels_;
    std::jthread thread_{[this] { loop_.run(); }};
};

TEST(RestingClient, ReturnsWhatItLentWhenItsOwnerUnloads) {
    Daemon daemon{fleet({test_model("a", "echo.pt"), test_model("b", "echo.pt")})};
    AsioClient client{daemon.socket()};
    client.run([&]() -> asio::awaitable<void> {
        AsyncChannel* a = co_await client.open("a");
        AsyncChannel* b = co_await client.open("b");
        const std::vector<std::int64_t> dims(1, 4);
        Result<Input> x = co_await a->async_allocate(wire::DType::float32, dims, use_awaitable);
        std::ranges::fill(x->as<float>(), 1.0F);
        const std::array<NamedInput, 1> inputs{{{"x", &*x}}};
        Request of_a;
        of_a.inputs = inputs;
        Result<Reply> first = co_await a->async_infer(of_a, use_awaitable);
        EXPECT_TRUE(first) << first.error().text();
        const std::array<NamedInput, 1> forwarded{{{"x", &first->outputs.at(0)}}};
        Request of_b;
        of_b.inputs = forwarded;
        const Result<Reply> second = co_await b->async_infer(of_b, use_awaitable);
        EXPECT_TRUE(second) << second.error().text();
    });

    const boost::json::object receipt = daemon.unload("a").value();

    EXPECT_TRUE(receipt.at("held_by").as_array().empty()) << boost::json::serialize(receipt);
}

}  // namespace
}  // namespace bulkhead::test
