#pragma once

#include <boost/asio/any_io_executor.hpp>
#include <boost/asio/execution/context.hpp>
#include <boost/asio/execution_context.hpp>
#include <boost/asio/query.hpp>
#include <boost/asio/strand.hpp>
#include <boost/asio/thread_pool.hpp>

#include "clients/cpp/base/limits.h"

namespace bulkhead {

/// Threads for work that would block a loop: handshakes, probes, unmapping GPU memory. The loop's
/// context owns them and joins them before it is destroyed, because a coroutine that ends on such a
/// thread still uses the loop.
class BlockingThreads final : public boost::asio::execution_context::service {
public:
    using key_type = BlockingThreads;
    static inline boost::asio::execution_context::id id;

    explicit BlockingThreads(boost::asio::execution_context& loop) : service{loop} {}

    using Executor = boost::asio::thread_pool::executor_type;
    static Executor of(const boost::asio::any_io_executor& executor) { return of_loop(executor).pool_.get_executor(); }
    /// For waits on the GPU, one at a time: however long they last, they take one thread.
    static boost::asio::strand<Executor> unmapping(const boost::asio::any_io_executor& executor) {
        return of_loop(executor).unmapping_;
    }
    /// One more thread, which runs no blocking work.
    static Executor polling(const boost::asio::any_io_executor& executor) {
        return of_loop(executor).polling_.get_executor();
    }

private:
    static BlockingThreads& of_loop(const boost::asio::any_io_executor& executor) {
        return boost::asio::use_service<BlockingThreads>(boost::asio::query(executor, boost::asio::execution::context));
    }
    void shutdown() override {
        pool_.stop();
        polling_.stop();
        pool_.join();
        polling_.join();
    }
    boost::asio::thread_pool pool_{limits::blocking_threads};
    boost::asio::strand<Executor> unmapping_{pool_.get_executor()};
    boost::asio::thread_pool polling_{1};
};

}  // namespace bulkhead
