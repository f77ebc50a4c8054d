#pragma once

#include <boost/asio/any_io_executor.hpp>
#include <boost/asio/execution/context.hpp>
#include <boost/asio/execution_context.hpp>
#include <boost/asio/query.hpp>
#include <boost/asio/thread_pool.hpp>

#include "clients/cpp/limits.h"

namespace bulkhead {

/// Where the coroutines of a loop do what waits. The threads belong to the loop's context, and are joined before it
/// goes: on a thread of somebody else's the last act of such a coroutine, giving up its work on the loop, could come
/// after the loop's end.
class BlockingThreads final : public boost::asio::execution_context::service {
public:
    using key_type = BlockingThreads;
    static inline boost::asio::execution_context::id id;

    explicit BlockingThreads(boost::asio::execution_context& loop) : service{loop} {}

    static boost::asio::thread_pool::executor_type of(const boost::asio::any_io_executor& executor) {
        auto& loop = boost::asio::query(executor, boost::asio::execution::context);
        return boost::asio::use_service<BlockingThreads>(loop).pool_.get_executor();
    }

private:
    void shutdown() override {
        pool_.stop();
        pool_.join();
    }
    boost::asio::thread_pool pool_{limits::blocking_threads};
};

}  // namespace bulkhead
