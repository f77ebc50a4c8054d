#pragma once

/// A worker's event loop around a fake engine, and clients that ask it for sequences.

#include <algorithm>
#include <cstring>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "tests/support/worker/fake_engine.h"
#include "tests/support/worker/loop_harness.h"

namespace bulkhead::worker::test {

using Ids = std::vector<std::int64_t>;

class GeneratingModel final : public FakeModel {
public:
    GeneratingModel(std::shared_ptr<ModelLog> log, std::shared_ptr<FakeEngine> engine)
        : FakeModel{std::move(log)}, engine_{std::move(engine)} {}
    generation::Engine* generator() noexcept override { return engine_.get(); }

private:
    std::shared_ptr<FakeEngine> engine_;
};

/// All that came for one request.
struct Heard {
    Ids streamed;
    std::size_t parts = 0;
    std::optional<channel::InferResult> last;
    std::optional<Error> error;
};

class GenerationChannel : public LoopTest {
protected:
    GenerationChannel() {
        spec.runtime = config::Runtime::generate;
        spec.file = "/nonexistent/package";
        load = [this](const config::ModelSpec&, const LoadContext&) -> Result<std::unique_ptr<Model>> {
            engine = std::make_shared<FakeEngine>(shape);
            engine->listens = false;
            if (gated) engine->at_launch = [this] { log->gate.pass(); };
            return std::unique_ptr<Model>{std::make_unique<GeneratingModel>(log, engine)};
        };
    }

    static void ask(TestClient& client, std::uint64_t request_id, const Ids& tokens,
                    boost::json::object parameters = {}, std::chrono::milliseconds deadline = 0ms) {
        client.infer(request_id, "generate", {tensor(client, tokens, request_id)}, std::move(parameters), deadline);
    }
    /// Each request has 4 KiB of the input slab to itself.
    static channel::Tensor tensor(TestClient& client, const Ids& tokens, std::uint64_t request_id) {
        const auto& [offer, memory] = *client.find_slab(wire::SlabDirection::input);
        const std::uint64_t offset = (request_id % 16) * 4096;
        std::ranges::copy(std::as_bytes(std::span{tokens}), memory.bytes().subspan(offset).begin());
        return {"tokens",
                wire::DType::int64,
                {static_cast<std::int64_t>(tokens.size())},
                {offer.slab_id, 0, offset, tokens.size() * sizeof tokens[0], request_id}};
    }
    /// Reads until each of these requests has its answer.
    std::map<std::uint64_t, Heard> listen(TestClient& client, std::size_t answers) {
        std::map<std::uint64_t, Heard> heard;
        while (answers > 0) {
            auto message = client.receive_answer();
            if (!message) {
                ADD_FAILURE() << "the channel ended";
                break;
            }
            if (const auto* failure = std::get_if<channel::Failure>(&*message)) {
                heard[failure->request_id].error = failure->error;
                --answers;
                continue;
            }
            auto& result = std::get<channel::InferResult>(*message);
            Heard& of = heard[result.request_id];
            if (result.more) {
                EXPECT_EQ(number(result.values, "index"), of.streamed.size());
                for (const boost::json::value& token : result.values.at("tokens").as_array())
                    of.streamed.push_back(token.to_number<std::int64_t>());
                ++of.parts;
            } else {
                of.last = std::move(result);
                --answers;
            }
        }
        return heard;
    }
    static Ids tokens_of(const TestClient& client, const Heard& heard) {
        const channel::Tensor& tensor = heard.last->tensors.at(0);
        EXPECT_EQ(tensor.name, "tokens");
        EXPECT_EQ(tensor.dtype, wire::DType::int64);
        for (const auto& [offer, memory] : client.slabs)
            if (offer.slab_id == tensor.lease.slab_id) {
                Ids ids(tensor.lease.size_bytes / sizeof(std::int64_t));
                std::memcpy(ids.data(), memory.bytes().data() + tensor.lease.offset_bytes, tensor.lease.size_bytes);
                return ids;
            }
        ADD_FAILURE() << "a result in a slab that was never offered";
        return {};
    }
    /// Greedy, without stop tokens.
    Ids expected(Ids before, std::size_t count) const {
        Ids given;
        for (std::size_t i = 0; i < count; ++i) {
            given.push_back(FakeEngine::next(before, shape, {}, 0));
            before.push_back(given.back());
        }
        return given;
    }
    boost::json::object generation() {
        say({{"type", "statistics_asked"}});
        return expect_said("statistics").at("generation").as_object();
    }
    void await_active(std::uint64_t count) {
        const auto until = Clock::now() + patience;
        while (number(generation(), "active") != count)
            ASSERT_LT(Clock::now(), until) << "never " << count << " active";
    }

    generation::Shape shape = FakeEngine::usual();
    bool gated = false;
    std::shared_ptr<FakeEngine> engine;
};

inline constexpr std::uint64_t streaming = wire::feature_streaming;

}  // namespace bulkhead::worker::test
