#include <cstdlib>

#include <boost/json.hpp>
#include <gmock/gmock.h>

#include "tests/unit/worker/generation_fixture.h"

namespace bulkhead::worker::generation::test {
namespace {

/// What transformers itself generated, as scripts/models/greedy_references.py writes it: another file than the committed
/// one, of more prompts or longer answers, by this variable.
std::filesystem::path references() {
    const char* const other = std::getenv("BULKHEAD_GREEDY_REFERENCES");
    return other != nullptr ? other : std::filesystem::path{BULKHEAD_SOURCE_DIR} / "tests/python/smollm2_greedy.json";
}

/// Every fourth prompt from the one given.
class GreedyTokens : public testing::TestWithParam<std::size_t> {};

TEST_P(GreedyTokens, OfSmolLm2AreThoseOfTransformers) {
    const auto package = std::filesystem::path{BULKHEAD_BINARY_DIR} / "models/smollm2";
    if (!std::filesystem::exists(package))
        GTEST_SKIP() << package.string() << " is missing: run scripts/models/prepare.py";
    ASSERT_TRUE(std::filesystem::exists(references())) << references();
    worker::test::TemporaryFolder cache;
    auto spec = generate_spec(package);
    spec.threads = 0;
    spec.generate.slots = 1;
    const auto model = load(spec, cache.path());
    ASSERT_TRUE(model) << model.error().text();
    Engine& engine = *(*model)->generator();

    const boost::json::value said = boost::json::parse(worker::test::contents(references()));
    const auto& prompts = said.at("prompts").as_array();
    ASSERT_GE(prompts.size(), 20U);
    std::size_t equal = 0;
    std::size_t near_ties = 0;
    for (std::size_t i = GetParam(); i < prompts.size(); i += 4) {
        const auto tokens = boost::json::value_to<std::vector<std::int32_t>>(prompts[i].at("tokens"));
        Wish wish{boost::json::value_to<Tokens>(prompts[i].at("prompt")), static_cast<std::uint32_t>(tokens.size())};
        const auto given = run_alone(engine, wish);
        const auto [ours, theirs] = std::mismatch(given.begin(), given.end(), tokens.begin());
        if (ours == given.end()) {
            ++equal;
            continue;
        }
        Tokens so_far = wish.prompt;
        so_far.insert(so_far.end(), given.begin(), ours);
        EXPECT_TRUE(near_tie(engine, so_far, *ours, *theirs, 1e-3F))
            << prompts[i].at("text") << ": " << *ours << " instead of " << *theirs << " after "
            << ours - given.begin();
        ++near_ties;
    }
    RecordProperty("equal", std::to_string(equal));
    RecordProperty("near_ties", std::to_string(near_ties));
    EXPECT_LE(near_ties, 1 + prompts.size() / 80) << "of a quarter of " << prompts.size() << " prompts";
}

INSTANTIATE_TEST_SUITE_P(Prompts, GreedyTokens, testing::Range<std::size_t>(0, 4));

}  // namespace
}  // namespace bulkhead::worker::generation::test
