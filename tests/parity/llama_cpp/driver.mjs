// Asks llama.cpp: node driver.mjs <folder with llama-addon.node> < requests.json > replies.json
//
// The addon is the native half of the npm package @node-llama-cpp/linux-x64, loaded without the JavaScript around it.
//
// request, one of a list: {model, threads, context, tokenize: [[text, parse_special], ...], logits: [[id, ...], ...],
//                          logits_file, greedy: [[[id, ...], count], ...], embed: [[id, ...], ...]}
// reply, in their order:  {tokenize: [[id, ...], ...], greedy: [[id, ...], ...], gaps: [[number, ...], ...], add_bos,
//                          description, embed: [[number, ...], ...]}, or {error} for a file that llama.cpp does not load
// logits_file gets float32 [positions of all sequences, vocabulary]. gaps: first minus second logit at each greedy step.
import {createRequire} from "node:module";
import {readFileSync, writeFileSync} from "node:fs";
import {join} from "node:path";

const F32_CACHE = 0; // ggml's type number: the cache adds no rounding of its own

function rowOf(pairs, size) {
    const row = new Float32Array(size);
    for (let i = 0; i < pairs.length; i += 2)
        row[pairs[i]] = pairs[i + 1];
    return row;
}

function twoLargest(row) {
    let first = -1, second = -1;
    for (let i = 0; i < row.length; i++) {
        if (first < 0 || row[i] > row[first])
            [first, second] = [i, first];
        else if (second < 0 || row[i] > row[second])
            second = i;
    }
    return [first, row[first] - row[second]];
}

class Sequence {
    constructor(context, sampler) {
        Object.assign(this, {context, sampler, length: 0});
    }

    // Logits after each of the wanted positions among `tokens`, which continue what is cached.
    async evaluate(tokens, wanted) {
        this.context.initBatch(tokens.length);
        const places = this.context.addToBatch(0, this.length, Uint32Array.from(tokens), Uint32Array.from(wanted));
        await this.context.decodeBatch();
        this.length += tokens.length;
        const rows = [];
        for (const place of places) {
            const [, , , pairs] = await this.context.sampleToken(place, this.sampler, false, false, true);
            rows.push(rowOf(pairs, pairs.length / 2));
        }
        return rows;
    }

    dispose() {
        this.context.disposeSequence(0);
    }
}

async function greedyTokens(sequence, prompt, count) {
    let [row] = await sequence.evaluate(prompt, [prompt.length - 1]);
    const ids = [], gaps = [];
    while (true) {
        const [best, gap] = twoLargest(row);
        ids.push(best);
        gaps.push(gap);
        if (ids.length === count)
            return [ids, gaps];
        [row] = await sequence.evaluate([best], [0]);
    }
}

async function evaluateAll(llama, model, request, reply) {
    const size = request.context;
    const context = new llama.AddonContext(model, {contextSize: size, batchSize: size, sequences: 1, swaFullCache: true,
        flashAttention: false, threads: request.threads, kvCacheKeyType: F32_CACHE, kvCacheValueType: F32_CACHE});
    if (!await context.init())
        throw new Error("llama.cpp makes no context");
    const sampler = new llama.AddonSampler(model);
    sampler.applyConfig({temperature: 0});
    const all = [];
    for (const tokens of request.logits) {
        const sequence = new Sequence(context, sampler);
        all.push(...await sequence.evaluate(tokens, tokens.map((_, i) => i)));
        sequence.dispose();
    }
    if (all.length > 0)
        writeFileSync(request.logits_file, Buffer.concat(all.map((row) => Buffer.from(row.buffer))));
    for (const [prompt, count] of request.greedy) {
        const sequence = new Sequence(context, sampler);
        const [ids, gaps] = await greedyTokens(sequence, prompt, count);
        reply.greedy.push(ids);
        reply.gaps.push(gaps);
        sequence.dispose();
    }
    await context.dispose();
}

// The vector of each text, pooled as the file says and not normalised.
async function embedAll(llama, model, request, reply) {
    const size = request.context;
    const context = new llama.AddonContext(model, {contextSize: size, batchSize: size, sequences: 1, swaFullCache: true,
        embeddings: true, flashAttention: false, threads: request.threads, kvCacheKeyType: F32_CACHE,
        kvCacheValueType: F32_CACHE});
    if (!await context.init())
        throw new Error("llama.cpp makes no context");
    for (const tokens of request.embed) {
        context.initBatch(tokens.length);
        context.addToBatch(0, 0, Uint32Array.from(tokens), Uint32Array.from(tokens.map((_, i) => i)));
        await context.decodeBatch();
        reply.embed.push([...context.getEmbedding(tokens.length)]);
        context.disposeSequence(0);
    }
    await context.dispose();
}

async function answer(llama, request) {
    const model = new llama.AddonModel(request.model, {addonExports: llama, gpuLayers: 0, useMmap: true, checkTensors: true});
    if (!await model.init())
        return {error: `llama.cpp does not load ${request.model}`};
    const reply = {tokenize: [], greedy: [], gaps: [], embed: [], add_bos: model.shouldPrependBosToken(),
        description: model.getModelDescription()};
    for (const [text, special] of request.tokenize)
        reply.tokenize.push([...model.tokenize(text, special)]);
    if (request.logits.length + request.greedy.length > 0)
        await evaluateAll(llama, model, request, reply);
    if (request.embed.length > 0)
        await embedAll(llama, model, request, reply);
    await model.dispose();
    return reply;
}

async function main() {
    const requests = JSON.parse(readFileSync(0, "utf8"));
    const llama = createRequire(import.meta.url)(join(process.argv[2], "llama-addon.node"));
    llama.setLogger((level, message) => process.stderr.write(message));
    llama.loadBackends();
    llama.loadBackends(process.argv[2]);
    await llama.init();
    const replies = [];
    for (const request of requests)
        replies.push(await answer(llama, request));
    process.stdout.write(JSON.stringify(replies), () => process.exit(0));
}

main().catch((error) => {
    process.stderr.write(`driver: ${error.stack ?? error}\n`);
    process.exit(1);
});
