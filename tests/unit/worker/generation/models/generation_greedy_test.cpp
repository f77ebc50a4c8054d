#include <cstdlib>

#include <boost/json.hpp>
#include <gmock/gmock.h>

#include "tests/unit/worker/generation_fixture.h"

namespace bulkhead::worker::generation::test {
namespace {

/// What transformers itself generated for one prompt.
struct Reference {
    std::string text;
    Tokens prompt;
    std::vector<std::int32_t> tokens;

    [[nodiscard]] Wish wish() const { return {prompt, static_cast<std::uint32_t>(tokens.size())}; }
    /// The prompt, and what was said behind it.
    [[nodiscard]] Tokens with_first(std::size_t count) const {
        Tokens all = prompt;
        all.insert(all.end(), tokens.begin(), tokens.begin() + static_cast<std::ptrdiff_t>(count));
        return all;
    }
};

/// As scripts/models/greedy_references.py writes it: another file than the committed one, of more
/// prompts or longer answers, by this variable.
std::filesystem::path references() {
    const char* const other = std::getenv("BULKHEAD_GREEDY_REFERENCES");
    return other != nullptr ? other : std::filesystem::path{BULKHEAD_SOURCE_DIR} / "tests/python/smollm2_greedy.json";
}

std::filesystem::path smollm2() { return std::filesystem::path{BULKHEAD_BINARY_DIR} / "models/smollm2"; }

/// One load, and prompts of which each is given in one of three ways: four at a time, in parts
/// behind a prefix that is kept, and each by itself.
class SmolLm2 : public testing::Test {
protected:
    static void SetUpTestSuite() {
        if (!std::filesystem::exists(smollm2())) return;
        // One thread: two wait for each other where others compute.
        auto spec = generate_spec(smollm2());
        spec.generate.slots = slots;
        worker::test::TemporaryFolder cache;
        auto loaded = load(spec, cache.path()).value();
        model_ = std::move(loaded);
    }
    static void TearDownTestSuite() { model_.reset(); }
    void SetUp() override {
        if (!std::filesystem::exists(smollm2()))
            GTEST_SKIP() << smollm2().string() << " is missing: run scripts/models/prepare.py";
        ASSERT_TRUE(model_);
        ASSERT_TRUE(std::filesystem::exists(references())) << references();
        const boost::json::value said = boost::json::parse(worker::test::contents(references()));
        for (const boost::json::value& one : said.at("prompts").as_array())
            said_.push_back({boost::json::value_to<std::string>(one.at("text")),
                             boost::json::value_to<Tokens>(one.at("prompt")),
                             boost::json::value_to<std::vector<std::int32_t>>(one.at("tokens"))});
        ASSERT_GE(said_.size(), 20U);
    }
    void TearDown() override {
        RecordProperty("equal", std::to_string(equal_));
        RecordProperty("near_ties", std::to_string(near_ties_));
    }

    static Engine& engine() { return *model_->generator(); }

    /// Where they part, it is in a near tie. What the slots hold is lost with it.
    void expect_said(const Reference& said, const std::vector<std::int32_t>& given) {
        ASSERT_EQ(given.size(), said.tokens.size());
        const auto [ours, theirs] = std::mismatch(given.begin(), given.end(), said.tokens.begin());
        if (ours == given.end()) {
            ++equal_;
            return;
        }
        const auto after = static_cast<std::size_t>(theirs - said.tokens.begin());
        EXPECT_TRUE(near_tie(engine(), said.with_first(after), *ours, *theirs, 1e-3F))
            << said.text << ": " << *ours << " instead of " << *theirs << " after " << after;
        ++near_ties_;
    }

    static constexpr std::uint32_t slots = 4;
    static constexpr std::size_t together = 8;
    static constexpr std::size_t in_parts = 4;
    std::vector<Reference> said_;
    std::size_t equal_ = 0;
    std::size_t near_ties_ = 0;

private:
    static inline std::unique_ptr<Model> model_;
};

TEST_F(SmolLm2, GreedyTokensAreThoseOfTransformers) {
    const auto alone = std::span{said_}.subspan(together + in_parts);
    for (const auto& one : alone) expect_said(one, run_alone(engine(), one.wish()));
    EXPECT_LE(near_ties_, 1 + alone.size() / 20) << "of " << alone.size() << " prompts";
}

/// Each joins and leaves while others are in the midst of theirs.
TEST_F(SmolLm2, SequencesInFourSlotsAreThoseOfTransformers) {
    struct Running {
        const Reference* said;
        std::vector<std::int32_t> given;
    };
    std::vector<Running> active;  // in the order of slots
    std::vector<Running> finished;
    std::size_t most = 0;
    auto next = said_.begin();
    for (int turn = 0; finished.size() < together; ++turn) {
        if (next != said_.begin() + together && active.size() < slots && (active.empty() || turn % 6 == 0)) {
            begin(engine(), static_cast<std::uint32_t>(active.size()), next->wish());
            active.push_back({&*next++, {}});
            most = std::max(most, active.size());
        }
        const auto given = step(engine(), static_cast<std::uint32_t>(active.size()));
        for (std::size_t i = 0; i < active.size(); ++i) active[i].given.push_back(given[i]);
        for (std::size_t i = active.size(); i-- > 0;) {
            if (active[i].given.size() < active[i].said->tokens.size()) continue;
            finished.push_back(active[i]);
            ASSERT_TRUE(
                engine().exchange(static_cast<std::uint32_t>(i), static_cast<std::uint32_t>(active.size() - 1)));
            std::swap(active[i], active.back());
            active.pop_back();
        }
    }
    EXPECT_EQ(most, slots);
    for (const Running& running : finished) expect_said(*running.said, running.given);
    EXPECT_LE(near_ties_, 1U);
}

/// A new prompt is computed behind what it shares with the last one, the words of the template; and
/// as the next part of a conversation, behind the answer that the slot itself gave.
TEST_F(SmolLm2, TokensBehindAPrefixThatIsKeptAreThoseOfTransformers) {
    Tokens held;
    std::vector<std::pair<Reference, std::vector<std::int32_t>>> all;
    for (const Reference& said : std::span{said_}.subspan(together, in_parts)) {
        const auto half = said.tokens.begin() + std::ssize(said.tokens) / 2;
        const Reference first{said.text, said.prompt, {said.tokens.begin(), half}};
        const Reference second{said.text, first.with_first(first.tokens.size()), {half, said.tokens.end()}};
        for (const Reference& part : {first, second}) {
            Wish wish = part.wish();
            const auto shared = std::ranges::mismatch(held, part.prompt).in2 - part.prompt.begin();
            wish.keep = static_cast<std::uint32_t>(std::min(shared, std::ssize(part.prompt) - 1));
            EXPECT_TRUE(all.empty() || wish.keep >= 10) << wish.keep << " positions are the same";
            const auto given = run_alone(engine(), wish);
            held = part.prompt;
            held.insert(held.end(), given.begin(), given.end() - 1);  // the last one was never fed
            all.emplace_back(part, given);
        }
    }
    for (const auto& [said, given] : all) expect_said(said, given);
    EXPECT_LE(near_ties_, 1U);
}

}  // namespace
}  // namespace bulkhead::worker::generation::test
