#include "worker/model/bucket_choice.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace bulkhead::worker {
namespace {

using config::Bucket;
using config::MethodSpec;
using testing::ElementsAre;
using Dims = std::vector<std::int64_t>;

/// Token ids and mask of one length, an embedding of fixed size and one row a token.
MethodSpec embedding() {
    MethodSpec method;
    method.inputs = {{"ids", wire::DType::int64, {{1, 1}, {1, 256}}}, {"mask", wire::DType::int64, {{1, 1}, {1, 256}}}};
    method.outputs = {{"embedding", wire::DType::float32, {{1, 1}, {384, 384}}},
                      {"tokens", wire::DType::float32, {{1, 1}, {1, 256}, {384, 384}}}};
    method.buckets = {{{{1, 256}, {1, 256}}}, {{{1, 16}, {1, 16}}}, {{{1, 64}, {1, 64}}}};
    method.padding = {{"ids", 0.0}, {"mask", 0.0}};
    return method;
}

BucketChoice choose(const MethodSpec& method, const std::vector<Dims>& inputs) {
    const std::vector<Shape> shapes{inputs.begin(), inputs.end()};
    return choose_bucket(method, method.buckets, shapes);
}

bool follow(const MethodSpec& method, const Bucket& bucket, const std::vector<Dims>& outputs) {
    const std::vector<Shape> shapes{outputs.begin(), outputs.end()};
    return outputs_follow_inputs(method, bucket, shapes);
}

TEST(BucketChoice, TakesTheBucketOfExactlyTheRequestsShapesWithoutPadding) {
    const BucketChoice choice = choose(embedding(), {{1, 64}, {1, 64}});

    EXPECT_EQ(choice.bucket, 2u);
    EXPECT_FALSE(choice.padded);
}

TEST(BucketChoice, PadsToTheSmallestThatFitsAndCutsBackTheDimsThatFollowAnInput) {
    const BucketChoice choice = choose(embedding(), {{1, 17}, {1, 17}});

    EXPECT_EQ(choice.bucket, 2u) << "whatever the order of declaration";
    EXPECT_TRUE(choice.padded);
    EXPECT_THAT(choice.output_dims, ElementsAre(ElementsAre(keep_dim, keep_dim), ElementsAre(keep_dim, 17, keep_dim)));
}

TEST(BucketChoice, PassesOverASmallerBucketThatWouldPadAnUndeclaredInput) {
    MethodSpec method;
    method.inputs = {{"a", wire::DType::float32, {{1, 8}}}, {"b", wire::DType::float32, {{1, 99}}}};
    method.outputs = {{"sum", wire::DType::float32, {{1, 8}}}};
    method.buckets = {{{{4}, {10}}}, {{{8}, {9}}}};
    method.padding = {{"a", 0.0}};

    EXPECT_EQ(choose(method, {{3}, {9}}).bucket, 1u);
}

TEST(BucketChoice, LetsAnOutputFollowTheInputOfItsName) {
    MethodSpec method = embedding();
    method.inputs[0].shape[1].name = "n";
    method.inputs[1].shape[1].name = "m";
    method.outputs[1].shape[1].name = "n";

    const BucketChoice choice = choose(method, {{1, 17}, {1, 18}});

    EXPECT_TRUE(choice.padded);
    EXPECT_THAT(choice.output_dims.at(1), ElementsAre(keep_dim, 17, keep_dim));
}

struct Eager {
    const char* because;
    void (*change)(MethodSpec&);
    std::vector<Dims> inputs;
    std::string_view reason;
};

TEST(BucketChoice, RunsEagerlyWhatNoBucketServes) {
    const auto unchanged = [](MethodSpec&) {};
    const std::vector<Dims> short_ones{{1, 17}, {1, 17}};
    const std::vector<Eager> all{
        {"larger than each", [](MethodSpec& m) { m.buckets.erase(m.buckets.begin()); }, {{1, 65}, {1, 65}},
         eager_reason::no_bucket},
        {"no fill value", [](MethodSpec& m) { m.padding.erase("mask"); }, short_ones,
         eager_reason::padding_not_declared},
        {"an output that could follow two sizes", unchanged, {{1, 17}, {1, 18}}, eager_reason::padding_ambiguous},
        {"an output that varies by itself", [](MethodSpec& m) { m.outputs[1].shape[1] = {1, 512}; }, short_ones,
         eager_reason::padding_ambiguous},
        {"no outputs declared", [](MethodSpec& m) { m.outputs.clear(); }, short_ones, eager_reason::padding_ambiguous},
        {"an empty dim", [](MethodSpec& m) { for (auto& input : m.inputs) input.shape[1].min = 0; }, {{1, 0}, {1, 0}},
         eager_reason::no_bucket},
        {"another rank", unchanged, {{1, 1, 17}, {1, 17}}, eager_reason::no_bucket},
        {"an input fewer", unchanged, {{1, 17}}, eager_reason::no_bucket},
        {"no buckets", [](MethodSpec& m) { m.buckets.clear(); }, short_ones, eager_reason::no_buckets},
    };
    for (const Eager& one : all) {
        SCOPED_TRACE(one.because);
        MethodSpec method = embedding();
        one.change(method);
        EXPECT_EQ(choose(method, one.inputs).reason, one.reason);
        if (one.reason.starts_with("padding")) {
            EXPECT_EQ(choose(method, {{1, 16}, {1, 16}}).bucket, 1u) << "an exact one needs no padding";
        }
    }
}

TEST(GraphBuckets, OfAMethodWhoseShapesAreAllFixedIsThatShape) {
    MethodSpec method;
    method.inputs = {{"x", wire::DType::float32, {{1, 1}, {3, 3}}}, {"scale", wire::DType::float32, {}}};

    EXPECT_THAT(graph_buckets(method), ElementsAre(Bucket{{{1, 3}, {}}}));
}

TEST(GraphBuckets, AreOnlyTheDeclaredOnesWhereAShapeVaries) {
    MethodSpec method = embedding();
    EXPECT_EQ(graph_buckets(method), method.buckets);

    method.buckets.clear();
    EXPECT_TRUE(graph_buckets(method).empty());
    EXPECT_TRUE(graph_buckets(MethodSpec{}).empty()) << "no inputs";
}

TEST(ElementCount, AddsUpAllInputsAndCountsAScalarAsOne) {
    EXPECT_EQ(element_count({{{2, 3}, {}, {4}}}), 6 + 1 + 4);
    EXPECT_EQ(shapes_text(Bucket{{{2, 3}, {}, {4}}}), "[2,3] [] [4]");
}

TEST(OutputsFollowInputs, WhenVaryingDimsAreAsLongAsTheirInputs) {
    const Bucket bucket{{{1, 64}, {1, 64}}};

    EXPECT_TRUE(follow(embedding(), bucket, {{1, 384}, {1, 64, 384}}));
    EXPECT_FALSE(follow(embedding(), bucket, {{1, 384}, {1, 65, 384}})) << "longer than what it should follow";
    EXPECT_FALSE(follow(embedding(), bucket, {{1, 384}, {64, 384}})) << "another rank";
    EXPECT_FALSE(follow(embedding(), bucket, {{1, 384}})) << "an output is missing";
}

}  // namespace
}  // namespace bulkhead::worker
