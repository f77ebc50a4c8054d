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

TEST(BucketChoice, PadsToTheSmallestThatFitsWhateverTheOrderOfDeclaration) {
    const BucketChoice choice = choose(embedding(), {{1, 17}, {1, 17}});

    EXPECT_EQ(choice.bucket, 2u);
    EXPECT_TRUE(choice.padded);
}

TEST(BucketChoice, CutsBackTheDimsThatFollowAnInputAndKeepsTheFixedOnes) {
    const BucketChoice choice = choose(embedding(), {{1, 17}, {1, 17}});

    EXPECT_THAT(choice.output_dims, ElementsAre(ElementsAre(keep_dim, keep_dim), ElementsAre(keep_dim, 17, keep_dim)));
}

TEST(BucketChoice, RunsEagerlyWhatIsLargerThanEveryBucket) {
    MethodSpec method = embedding();
    method.buckets.erase(method.buckets.begin());

    EXPECT_EQ(choose(method, {{1, 65}, {1, 65}}).reason, eager_reason::no_bucket);
}

TEST(BucketChoice, NeverPadsAnInputWithoutADeclaredFillValue) {
    MethodSpec method = embedding();
    method.padding.erase("mask");

    EXPECT_EQ(choose(method, {{1, 17}, {1, 17}}).reason, eager_reason::padding_not_declared);
    EXPECT_EQ(choose(method, {{1, 16}, {1, 16}}).bucket, 1u) << "an exact one needs no padding";
}

TEST(BucketChoice, PassesOverASmallerBucketThatWouldPadAnUndeclaredInput) {
    MethodSpec method;
    method.inputs = {{"a", wire::DType::float32, {{1, 8}}}, {"b", wire::DType::float32, {{1, 99}}}};
    method.outputs = {{"sum", wire::DType::float32, {{1, 8}}}};
    method.buckets = {{{{4}, {10}}}, {{{8}, {9}}}};
    method.padding = {{"a", 0.0}};

    EXPECT_EQ(choose(method, {{3}, {9}}).bucket, 1u);
}

TEST(BucketChoice, RunsEagerlyWhereAnOutputCouldFollowTwoInputsOfDifferentSize) {
    EXPECT_EQ(choose(embedding(), {{1, 17}, {1, 18}}).reason, eager_reason::padding_ambiguous);
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

TEST(BucketChoice, RunsEagerlyWhereAnOutputVariesByItself) {
    MethodSpec method = embedding();
    method.outputs[1].shape[1] = {1, 512};  // twice the tokens, perhaps: nothing says so

    EXPECT_EQ(choose(method, {{1, 17}, {1, 17}}).reason, eager_reason::padding_ambiguous);
    EXPECT_EQ(choose(method, {{1, 64}, {1, 64}}).bucket, 2u) << "exact shapes cut nothing";
}

TEST(BucketChoice, RunsEagerlyWhereOutputsAreNotDeclared) {
    MethodSpec method = embedding();
    method.outputs.clear();

    EXPECT_EQ(choose(method, {{1, 17}, {1, 17}}).reason, eager_reason::padding_ambiguous);
}

TEST(BucketChoice, NeverPadsAnEmptyDim) {
    MethodSpec method = embedding();
    for (auto& input : method.inputs) input.shape[1].min = 0;

    EXPECT_EQ(choose(method, {{1, 0}, {1, 0}}).reason, eager_reason::no_bucket);
}

TEST(BucketChoice, DoesNotFitAnotherRank) {
    EXPECT_EQ(choose(embedding(), {{1, 1, 17}, {1, 17}}).reason, eager_reason::no_bucket);
    EXPECT_EQ(choose(embedding(), {{1, 17}}).reason, eager_reason::no_bucket);
}

TEST(BucketChoice, WithoutBucketsSaysSo) {
    MethodSpec method = embedding();
    method.buckets.clear();

    EXPECT_EQ(choose(method, {{1, 17}, {1, 17}}).reason, eager_reason::no_buckets);
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
}

TEST(GraphBuckets, OfAMethodWithoutInputsAreNone) { EXPECT_TRUE(graph_buckets(MethodSpec{}).empty()); }

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
