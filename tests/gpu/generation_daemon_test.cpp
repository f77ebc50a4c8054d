// Tokens of captured steps through the daemon, held against those of eager steps: after a cancel,
// after a worker's death.

#include <signal.h>

#include <vector>

#include <gtest/gtest.h>

#include "tests/gpu/models.h"
#include "tests/gpu/nvml.h"
#include "tests/support/daemon/generation.h"

namespace bulkhead::test {
namespace {

namespace json = boost::json;

/// Nearly all of a sequence's 256 positions, across the bucket of 64.
constexpr int tokens = 200;

class GpuGenerationDaemon : public testing::Test {
protected:
    void SetUp() override {
        SKIP_WITHOUT_GPU();
        const std::filesystem::path package = gpu_model_folder() + "/tiny_generate";
        if (!std::filesystem::exists(package))
            GTEST_SKIP() << "no tiny_generate: make_models.py makes it where transformers is installed";
        const auto model = [&](const std::string& name, const std::string& graphs) {
            return "  " + name + ":\n    runtime: generate\n    device: \"cuda:0\"\n    package: " + package.string() +
                   "\n    graphs: " + graphs + "\n    generate: {slots: 1, buckets: [64, 256]}\n    queue: 256\n";
        };
        daemon_.emplace("version: 1\nmodels:\n" + model("graphs", "required") + model("eager", "off"));
        Channel eager = daemon_->open("eager").value();
        for (const std::int64_t first : {3, 90}) expected_.push_back(answer_of(eager, first));
        ASSERT_NE(expected_[0], expected_[1]);
    }
    static std::vector<std::int64_t> answer_of(Channel& channel, std::int64_t first) {
        const Answered answered = generate(channel, prompt(first, 20), greedy(tokens));
        EXPECT_FALSE(answered.error) << answered.error->text();
        EXPECT_EQ(answered.all.size(), static_cast<std::size_t>(tokens));
        return answered.all;
    }
    /// The next sequences of `channel`, in the slot that others had before, give what
    /// eager steps gave.
    void expect_eager_tokens(Channel& channel) const {
        EXPECT_EQ(answer_of(channel, 3), expected_[0]);
        EXPECT_EQ(answer_of(channel, 90), expected_[1]);
        EXPECT_EQ(answer_of(channel, 3), expected_[0]) << "a slot that was used";
        const boost::json::object row = daemon_->row("graphs");
        for (const auto& [reason, steps] : row.at("generate").at("eager").as_object())
            EXPECT_EQ(steps.to_number<std::int64_t>(), 0) << reason;
    }
    std::optional<Daemon> daemon_;
    std::vector<std::vector<std::int64_t>> expected_;
};

TEST_F(GpuGenerationDaemon, GraphTokensEqualEagerOnesAfterACancel) {
    Channel channel = daemon_->open("graphs").value();
    bool was_cancelled = false;
    // It may be over before the word arrives.
    for (int tried = 0; !was_cancelled && tried < 100; ++tried) {
        Answered answered;
        const std::uint64_t id = submit(channel, prompt(tried, 20), greedy(tokens)).value();
        ASSERT_TRUE(take(channel, id, answered));
        ASSERT_TRUE(channel.cancel(id));
        answered = rest_of(channel, id, answered);
        was_cancelled = answered.error.has_value();
    }
    EXPECT_TRUE(was_cancelled);
    expect_eager_tokens(channel);
}

TEST_F(GpuGenerationDaemon, GraphTokensEqualEagerOnesAfterARestart) {
    std::size_t lost = 0;
    std::int64_t generation = 0;
    {
        Channel channel = daemon_->open("graphs").value();
        generation = daemon_->row("graphs").at("generation").as_int64();
        std::vector<std::uint64_t> ids;
        for (int i = 0; i < 64; ++i) ids.push_back(submit(channel, prompt(i, 20), greedy(tokens)).value());
        Answered first;
        ASSERT_TRUE(take(channel, ids[0], first));
        ::kill(daemon_->pid("graphs"), SIGKILL);
        for (const std::uint64_t id : ids) {
            const Answered answered = rest_of(channel, id);
            if (!answered.error) continue;
            EXPECT_EQ(answered.error->code, ErrorCode::worker_lost) << answered.error->text();
            ++lost;
        }
    }
    EXPECT_GT(lost, 0u);
    ASSERT_TRUE(daemon_->wait_until(
        "graphs",
        [generation](const json::object& row) {
            return row.at("generation").as_int64() > generation && row.at("state").as_string() == "ready";
        },
        std::chrono::seconds{30}));
    Channel channel = daemon_->open("graphs").value();
    expect_eager_tokens(channel);
}

}  // namespace
}  // namespace bulkhead::test
