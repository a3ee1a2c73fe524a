// Node's own `fetch`. Argument: URL. Prints what came as one JSON object.
const answer = await fetch(process.argv[2]);
const body = await answer.text();
console.log(JSON.stringify({ status: answer.status, kind: answer.headers.get('content-type'), body }));
