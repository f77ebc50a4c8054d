#include <random>

#include "tests/unit/worker/batcher_fixture.h"

namespace bulkhead::worker::generation {
namespace {

/// Whatever joins, leaves, is removed or shares a prefix with whatever else: each gives what it
/// would give alone.
class BatcherHistories : public BatcherTest, public testing::WithParamInterface<std::uint32_t> {
protected:
    void live(std::uint32_t seed, Shape with, std::uint32_t ahead) {
        std::mt19937 random{seed};
        const auto pick = [&](std::size_t below) {
            return std::uniform_int_distribution<std::size_t>{0, below - 1}(random);
        };
        make(std::move(with), 1 + static_cast<std::uint32_t>(pick(16)), ahead);
        engine->listens = false;
        std::vector<Batcher::Number> alive;
        std::set<Batcher::Number> removed;
        for (int event = 0; event < 300; ++event) {
            std::erase_if(alive, [&](auto number) { return endings.contains(number); });
            if (pick(3) == 0 && alive.size() < shape.slots) {
                Ids tokens = next_prompt(pick, removed);
                GenerateParameters request = ask(static_cast<std::uint32_t>(1 + pick(12)));
                if (pick(2) == 0) request.rules.stop = {static_cast<std::int32_t>(pick(64))};
                if (pick(2) == 0) request.sampling = {.do_sample = true, .seed = pick(5)};
                alive.push_back(add(tokens, request, pick(2) == 0));
            } else if (pick(12) == 0 && !alive.empty()) {
                const std::size_t which = pick(alive.size());
                batcher->remove(alive[which]);
                removed.insert(alive[which]);
                alive.erase(alive.begin() + static_cast<std::ptrdiff_t>(which));
            } else {
                batcher->turn();
            }
        }
        run();
        for (Batcher::Number number = 1; number <= last; ++number) {
            if (removed.contains(number)) {
                EXPECT_FALSE(endings.contains(number));
                continue;
            }
            expect_right(number);
            if (heard.contains(number)) {
                EXPECT_EQ(heard[number], ending_of(number).tokens);
            }
        }
    }
    /// Often what an earlier one had, or a part of it, with what it gave.
    template <typename Pick>
    Ids next_prompt(Pick& pick, const std::set<Batcher::Number>& removed) {
        const std::uint32_t c = shape.codebooks;
        Ids tokens;
        if (last > 0 && pick(3) > 0) {
            const Batcher::Number old = 1 + pick(last);
            tokens = prompts.at(old).tokens;
            if (!shape.embeddings && !removed.contains(old))
                for (const std::int32_t token : alone(old)) tokens.push_back(token);
            tokens.resize(std::min<std::size_t>(c * (1 + pick(tokens.size() / c)), 48 * c));
        }
        const std::size_t more = 1 + pick(4);
        for (std::size_t i = 0; i < more * c; ++i) tokens.push_back(static_cast<std::int64_t>(pick(64)));
        return tokens;
    }
};

TEST_P(BatcherHistories, OfOneCodebook) { live(GetParam(), FakeEngine::usual(), 1); }
TEST_P(BatcherHistories, OfOneCodebookWithStepsAhead) { live(GetParam(), FakeEngine::usual(), 2); }
TEST_P(BatcherHistories, OfPrefillsThatGive) {
    Shape gives = FakeEngine::usual();
    gives.prefill_gives = true;
    live(GetParam(), gives, 2);
}
TEST_P(BatcherHistories, OfThreeCodebooksInTwoSlots) {
    Shape books = FakeEngine::usual();
    books.codebooks = 3;
    books.slots = 2;
    books.inputs = {{"tokens", wire::DType::int64, {{1, 64, "T"}, {3, 3}}}};
    live(GetParam(), books, 1);
}
TEST_P(BatcherHistories, OfOneSlot) {
    Shape one = FakeEngine::usual();
    one.slots = 1;
    live(GetParam(), one, 2);
}
INSTANTIATE_TEST_SUITE_P(Seeds, BatcherHistories, testing::Range(0U, 40U));

}  // namespace
}  // namespace bulkhead::worker::generation
