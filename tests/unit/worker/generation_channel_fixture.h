#pragma once

/// A worker's event loop around a fake engine, and clients that ask it for sequences.

#include <map>
#include <memory>
#include <optional>
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
    /// The parameters by which a sequence has so many tokens.
    static boost::json::object exactly(auto tokens) {
        return {{"max_new_tokens", tokens}, {"ignore_stop", true}};
    }
    void lengthen(std::uint32_t length) {
        shape.length = length;
        shape.inputs[0].shape[0].max = length;
    }
    /// Each request has 4 KiB of the input slab to itself.
    static channel::Tensor tensor(TestClient& client, const Ids& tokens, std::uint64_t request_id) {
        return client.tensor<std::int64_t>("tokens", wire::DType::int64, tokens, (request_id % 16) * 4096, request_id);
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
        return client.values<std::int64_t>(tensor);
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
    boost::json::object generation() { return statistics().at("generation").as_object(); }
    void await_active(std::uint64_t count) {
        await("active", count, [](const auto& told) { return number(told.at("generation").as_object(), "active"); });
    }

    generation::Shape shape = FakeEngine::usual();
    bool gated = false;
    std::shared_ptr<FakeEngine> engine;
};

inline constexpr std::uint64_t streaming = wire::feature_streaming;

}  // namespace bulkhead::worker::test
